"""The planner's pure half: integers in, a frozen plan out. No torch here."""
