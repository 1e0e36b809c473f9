"""timm backbones: building them, finding their chain, tracing its costs, applying a plan."""
