"""Class folders and manifests become samples, splits and classes; everything wrong is said at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest

from hiresvis.data.inputs import find_inputs
from hiresvis.data.regions import Region
from hiresvis.data.sources import Datasets, load_dataset, load_datasets
from hiresvis.errors import DataError


def write_table(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def empty_files(folder: Path, names: list[str]) -> None:
    """Files whose names alone matter."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def names_of(datasets: Datasets, split: str) -> list[str]:
    return [sample.name for sample in datasets.splits()[split].samples]


class TestClasses:
    def test_classes_come_from_train_and_val_is_matched_by_name(self, make_folders: Callable[..., Path]) -> None:
        """train{a,b,c} and val{b,c}: label 1 is b in both splits."""
        found = load_datasets(make_folders("train", {"a": 1, "b": 1, "c": 1}), make_folders("val", {"b": 2, "c": 1}))
        assert found.classes == ("a", "b", "c")
        assert [(sample.label, sample.path.parent.name) for sample in found.val.samples] == [(1, "b"), (1, "b"), (2, "c")]
        assert found.val.class_counts() == {"a": 0, "b": 2, "c": 1}

    def test_label_unknown_to_train_is_an_error_with_counts(self, make_folders: Callable[..., Path]) -> None:
        """train{a} and val{a,z}: the message names z, its count, and the way to go on."""
        with pytest.raises(DataError, match=r"data.val.*'z' \(2 images\).*train has 'a'.*unseen: drop"):
            load_datasets(make_folders("train", {"a": 2}), make_folders("val", {"a": 1, "z": 2}))

    def test_unseen_drop_leaves_these_images_out_and_says_so(self, make_folders: Callable[..., Path]) -> None:
        """`unseen: drop` keeps the rest of val and reports the number."""
        found = load_datasets(make_folders("train", {"a": 2, "b": 1}), make_folders("val", {"a": 1, "z": 2}), unseen="drop")
        assert [sample.path.parent.name for sample in found.val.samples] == ["a"]
        assert any("2 images dropped" in finding.message for finding in found.findings)

    def test_every_split_with_unknown_labels_is_named_at_once(self, make_folders: Callable[..., Path]) -> None:
        """val and test are both wrong: one error holds both, with the near name as a suggestion."""
        train = make_folders("train", {"scratch": 1, "good": 1})
        with pytest.raises(DataError) as caught:
            load_datasets(train, make_folders("val", {"Scratch": 1}), make_folders("test", {"hole": 1}))
        assert [problem.key for problem in caught.value.problems] == ["data.val", "data.test"]
        assert "did you mean 'scratch'?" in caught.value.problems[0].message

    def test_a_single_class_is_an_error(self, make_folders: Callable[..., Path]) -> None:
        """Nothing can be told apart, and the metrics need two classes: said before anything is trained."""
        with pytest.raises(DataError, match=r"train   data\.train  'a' is the only class; a classifier needs two"):
            load_datasets(make_folders("train", {"a": 3}), 0.5)

    def test_given_order_of_classes_is_kept(self, make_folders: Callable[..., Path]) -> None:
        """A list of classes sets the label numbers, whatever the alphabet says."""
        found = load_datasets(make_folders("train", {"a": 1, "b": 1}), make_folders("val", {"a": 1}), classes=("b", "a"))
        assert found.classes == ("b", "a")
        assert found.val.samples[0].label == 1

    def test_given_classes_that_lack_one_of_train_are_refused(self, make_folders: Callable[..., Path]) -> None:
        """No image of train is left out in silence."""
        with pytest.raises(DataError, match=r"lacks classes that train holds: b \(3 images\)"):
            load_datasets(make_folders("train", {"a": 1, "b": 3}), 0.5, classes=("a",))

    def test_empty_class_folder_stays_a_class_with_a_warning(self, make_folders: Callable[..., Path]) -> None:
        """An empty folder in train keeps its place in the label order."""
        found = load_datasets(make_folders("train", {"a": 1, "b": 0, "c": 1}), make_folders("val", {"c": 1}))
        assert found.classes == ("a", "b", "c")
        assert found.val.samples[0].label == 2
        assert any("'b' has no images" in finding.message for finding in found.findings)

    def test_train_without_any_image_is_an_error(self, make_folders: Callable[..., Path]) -> None:
        """Only empty folders: there is nothing to train on."""
        root = make_folders("train", {"a": 0, "b": 0})
        empty_files(root, ["a/notes.txt"])
        with pytest.raises(DataError, match=r"holds no images.*1 \.txt"):
            load_datasets(root, 0.5)


class TestFolders:
    def test_hidden_and_system_files_are_ignored_and_listed(self, make_folders: Callable[..., Path]) -> None:
        """`.ipynb_checkpoints`, `__MACOSX`, `._x.jpg`, `Thumbs.db`: no class, no image, and in the list of what was ignored."""
        root = make_folders("train", {"a": 1, "b": 1})
        hidden = [".ipynb_checkpoints/a.jpg", "__MACOSX/b.jpg", "a/._x.jpg", "a/Thumbs.db", "b/.hidden/c.png", ".DS_Store"]
        empty_files(root, hidden)
        found = load_datasets(root, make_folders("val", {"a": 1}))
        assert found.classes == ("a", "b")
        assert names_of(found, "train") == ["a/000.png", "b/000.png"]
        assert set(found.train.ignored) == {".ipynb_checkpoints/", "__MACOSX/", "a/._x.jpg", "a/Thumbs.db", "b/.hidden/", ".DS_Store"}

    def test_extensions_count_whatever_the_case_and_others_are_counted(self, tmp_path: Path) -> None:
        """`.JPG`, `.TIF`, `.webp` are taken; every other extension is reported with its number."""
        empty_files(
            tmp_path, ["a/1.JPG", "a/2.TIF", "a/3.webp", "a/4.Jpeg", "a/x.txt", "a/y.TXT", "a/z.gif", "b/5.png", "b/README", "top.csv"]
        )
        found = load_datasets(tmp_path, 0.3)
        assert sorted(names_of(found, "train") + names_of(found, "val")) == ["a/1.JPG", "a/2.TIF", "a/3.webp", "a/4.Jpeg", "b/5.png"]
        assert found.train.skipped_extensions == {".txt": 2, ".gif": 1, "(no extension)": 1, ".csv": 1}

    def test_deeper_folders_belong_to_their_class(self, tmp_path: Path) -> None:
        """`a/slide7/1.png` is of class a; links in a circle end."""
        empty_files(tmp_path, ["a/slide7/1.png", "a/2.png", "b/1.png"])
        (tmp_path / "a" / "again").symlink_to(tmp_path / "a")
        found = find_inputs([str(tmp_path)])
        assert [sample.name for sample in found.samples] == ["a/2.png", "a/slide7/1.png", "b/1.png"]

    def test_folder_called_like_an_image_is_listed_for_the_decoder_to_refuse(self, tmp_path: Path) -> None:
        """`a/x.jpg/` does not vanish."""
        empty_files(tmp_path, ["a/1.png", "a/x.jpg/inside.png"])
        assert [sample.name for sample in find_inputs([str(tmp_path)]).samples] == ["a/1.png", "a/x.jpg"]

    def test_images_outside_any_class_folder_are_reported(self, make_folders: Callable[..., Path]) -> None:
        """Loose images beside class folders are left out, and counted aloud."""
        root = make_folders("train", {"a": 2, "b": 2})
        empty_files(root, ["loose.png"])
        found = load_datasets(root, 0.5)
        assert any("1 images outside any class folder" in finding.message for finding in found.findings)

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            (["1.png", "2.png"], "no class folders: found 2 images and no folder"),
            (["train/a/1.png", "val/a/1.png"], "splits, not classes: train, val"),
        ],
    )
    def test_folder_of_another_layout_is_refused_with_the_expected_one(self, tmp_path: Path, files: list[str], message: str) -> None:
        """A flat folder and a folder of splits are told apart from class folders."""
        empty_files(tmp_path, files)
        with pytest.raises(DataError, match=message):
            load_datasets(tmp_path, 0.5)

    def test_missing_source_is_named_with_the_nearest_there(self, make_folders: Callable[..., Path]) -> None:
        """A typing error in a path gets a suggestion."""
        root = make_folders("train", {"a": 1})
        with pytest.raises(DataError, match=r"trian  does not exist; did you mean .*train"):
            load_datasets(root.with_name("trian"), 0.5)

    def test_every_source_that_cannot_be_read_is_named_at_once(self, tmp_path: Path) -> None:
        """train and test are both missing: one error for both."""
        (tmp_path / "val").mkdir()
        with pytest.raises(DataError) as caught:
            load_datasets(tmp_path / "train", tmp_path / "val", tmp_path / "test")
        assert [Path(problem.place).name for problem in caught.value.problems] == ["train", "val", "test"]


class TestFraction:
    def test_share_is_stratified_and_leaves_every_class_on_both_sides(self, make_folders: Callable[..., Path]) -> None:
        """A fifth of 20 and of 5 is 4 and 1; a class of one image stays in train and is named."""
        found = load_datasets(make_folders("train", {"a": 20, "b": 5, "c": 1}), 0.2)
        assert found.val.class_counts() == {"a": 4, "b": 1, "c": 0}
        assert found.train.class_counts() == {"a": 16, "b": 4, "c": 1}
        assert any("validate these classes: c" in finding.message for finding in found.findings)

    def test_same_seed_gives_the_same_files_in_any_order_of_creation(self, tmp_path: Path) -> None:
        """The split depends on names and seed, not on the file system's order."""
        names = [f"{label}/{index}.png" for label in "ab" for index in range(20)]
        empty_files(tmp_path / "one", names)
        empty_files(tmp_path / "two", names[::-1])
        first, second = (load_datasets(tmp_path / root, 0.25, seed=3) for root in ("one", "two"))
        other = load_datasets(tmp_path / "one", 0.25, seed=4)
        assert names_of(first, "val") == names_of(second, "val")
        assert names_of(first, "val") != names_of(other, "val")
        assert not set(names_of(first, "val")) & set(names_of(first, "train"))

    def test_order_of_rows_does_not_change_the_split(self, tmp_path: Path) -> None:
        """A table sorted anew holds out the same files."""
        empty_files(tmp_path, [f"{index}.png" for index in range(30)])
        rows = [f"{index}.png,{'ab'[index % 2]}" for index in range(30)]
        first = load_datasets(write_table(tmp_path / "1.csv", "path,label\n" + "\n".join(rows)), 0.3)
        second = load_datasets(write_table(tmp_path / "2.csv", "path,label\n" + "\n".join(rows[::-1])), 0.3)
        assert set(names_of(first, "val")) == set(names_of(second, "val"))

    def test_groups_never_straddle_and_classes_stay_balanced(self, tmp_path: Path) -> None:
        """Whole groups go to one side; the held-out share comes near to what was asked, in each class."""
        empty_files(tmp_path, [f"{index}.png" for index in range(200)])
        rows = [f"{index}.png,{'ab'[index // 5 % 2]},g{index // 5}" for index in range(200)]
        table = write_table(tmp_path / "t.csv", "path,label,site\n" + "\n".join(rows))
        found = load_datasets(table, 0.2, group_column="site")
        sides = {split: {sample.group for sample in dataset.samples} for split, dataset in found.splits().items()}
        assert not sides["train"] & sides["val"]
        assert found.val.class_counts() == {"a": 20, "b": 20}

    def test_group_that_holds_a_class_alone_stays_in_train(self, tmp_path: Path) -> None:
        """No class is moved out of train whole."""
        empty_files(tmp_path, [f"{index}.png" for index in range(12)])
        rows = [f"{index}.png,{'rare' if index >= 9 else 'a'},g{index // 3}" for index in range(12)]
        found = load_datasets(write_table(tmp_path / "t.csv", "path,label,g\n" + "\n".join(rows)), 0.25, group_column="g", seed=1)
        assert found.train.class_counts()["rare"] == 3
        assert found.val.class_counts() == {"a": 3, "rare": 0}

    def test_one_group_cannot_be_split(self, tmp_path: Path) -> None:
        """A single group gives an error with the way on, not an empty validation."""
        empty_files(tmp_path, ["1.png", "2.png"])
        table = write_table(tmp_path / "t.csv", "path,label,g\n1.png,a,x\n2.png,a,x\n")
        with pytest.raises(DataError, match=r"1 groups of 1 classes cannot give a validation share of 0\.5.*give data\.val a path"):
            load_datasets(table, 0.5, group_column="g")

    def test_groups_across_given_splits_are_an_error(self, tmp_path: Path) -> None:
        """The same patient in train and val is named with a row of each."""
        empty_files(tmp_path, ["1.png", "2.png", "3.png"])
        table = write_table(tmp_path / "t.csv", "path,label,split,g\n1.png,a,train,p1\n2.png,a,val,p1\n3.png,a,train,p2\n")
        with pytest.raises(DataError, match=r"group 'p1' is in train \(1 rows, t\.csv:2\) and val \(1 rows, t\.csv:3\)"):
            load_datasets(table, 0.5, split_column="split", group_column="g")


class TestManifest:
    def test_table_as_spreadsheets_write_it_is_read(self, tmp_path: Path) -> None:
        """BOM, Windows line ends, `;`, spaces in names, paths relative to the table's folder and backslashes."""
        empty_files(tmp_path / "tables", ["my scans/left eye.png", "my scans/b.png", "c.png"])
        text = '\ufeffpath;label\r\n"my scans/left eye.png"; healthy \r\nmy scans\\b.png;ill\r\n\r\nc.png;ill\r\n'
        table = write_table(tmp_path / "tables" / "all.csv", text)
        found = load_dataset(table, classes=("healthy", "ill"))
        assert [(sample.name, sample.label, sample.row) for sample in found.samples] == [
            ("my scans/left eye.png", 0, "all.csv:2"),
            ("my scans/b.png", 1, "all.csv:3"),
            ("c.png", 1, "all.csv:5"),
        ]
        assert all(sample.path.is_file() for sample in found.samples)

    def test_all_bad_rows_are_reported_at_once_with_their_lines(self, tmp_path: Path) -> None:
        """A missing file, an empty label, NaN, a repeated image and a short row: five lines, five messages."""
        empty_files(tmp_path, ["1.png", "2.png", "3.png"])
        text = "path,label\r\n1.png,a\r\nmissing.png,a\r\n2.png,\r\n3.png,NaN\r\n1.png,b\r\nshort\r\n"
        table = write_table(tmp_path / "train.csv", text)
        with pytest.raises(DataError) as caught:
            load_datasets(table, 0.5)
        found = {problem.place: problem.message for problem in caught.value.problems}
        assert list(found) == [f"train.csv:{line}" for line in (3, 4, 5, 6, 7)]
        assert "no such file" in found["train.csv:3"]
        assert "no label" in found["train.csv:4"]
        assert "(NaN)" in found["train.csv:5"]
        assert "listed before, at train.csv:2 with label 'a'" in found["train.csv:6"]
        assert "1 fields where the header has 2" in found["train.csv:7"]

    @pytest.mark.parametrize("again", ["{root}/images/1.png", "linked/1.png", "{root}/linked/../images/1.png", "images//1.png"])
    def test_an_image_listed_twice_is_found_however_it_is_written(self, tmp_path: Path, again: str) -> None:
        """Relative, absolute, or through a linked folder: it is one file, and the first row is named."""
        empty_files(tmp_path, ["images/1.png", "images/2.png"])
        (tmp_path / "linked").symlink_to(tmp_path / "images")
        text = f"path,label\nimages/1.png,a\nimages/2.png,b\n{again.format(root=tmp_path)},a\n"
        with pytest.raises(DataError, match=r"^train\.csv:4  .*1\.png is listed before, at train\.csv:2; keep one row an image$"):
            load_datasets(write_table(tmp_path / "train.csv", text), 0.5)

    def test_no_two_spellings_of_a_file_or_a_name_pass(self, tmp_path: Path) -> None:
        """Whichever comes first; also where `..` behind a link leads to another file that would have the same name."""
        empty_files(tmp_path, ["images/1.png", "far/off/x.png", "far/1.png", "1.png", "2.png"])
        (tmp_path / "linked").symlink_to(tmp_path / "images")
        (tmp_path / "there").symlink_to(tmp_path / "far" / "off")
        one = ["images/1.png", "./images/1.png", "linked/1.png", "images\\1.png", "far/../images//1.png", f"{tmp_path}/linked/1.png"]
        for first, second in [*permutations(one, 2), *permutations(("1.png", "there/../1.png", "./1.png"), 2)]:
            table = write_table(tmp_path / "t.csv", f"path,label\n2.png,b\n{first},a\n{second},b\n")
            with pytest.raises(DataError, match=r"^t\.csv:4  .*1\.png is listed before, at t\.csv:3 with label 'a'; keep one row"):
                load_datasets(table, 0.5)

    def test_another_encoding_is_told_with_its_line(self, tmp_path: Path) -> None:
        """The line of the table, however far into the file, and not a byte of a block."""
        rows = b"".join(b"%d.png,a\n" % index for index in range(2000))
        (tmp_path / "t.csv").write_bytes(b"path,label\n" + rows + b"na\xefve.png,b\n")
        with pytest.raises(DataError, match=r"^t\.csv:2002  byte 0xef is not UTF-8; save the file as UTF-8$"):
            load_datasets(tmp_path / "t.csv", 0.5)

    def test_long_lists_of_problems_end_with_the_count_of_the_rest(self, tmp_path: Path) -> None:
        """100 missing files: that they are so many and where paths start, nineteen lines, and one that counts."""
        table = write_table(tmp_path / "t.csv", "path,label\n" + "".join(f"{index}.png,a\n" for index in range(100)))
        with pytest.raises(DataError, match=r"and 81 more") as caught:
            load_datasets(table, 0.5)
        assert len(caught.value.problems) == 21
        assert caught.value.problems[0].message == f"names 100 files that are not there; relative paths start at {tmp_path}"

    @pytest.mark.parametrize(
        ("text", "remedy"),
        [
            ("image,kind\n1.png,a\n", "columns: image, kind); give the name of one that is there"),
            ("path label\n1.png a\n", "columns: path label); there is one column alone; separate values by comma"),
            ("1.png,a\n2.png,b\n", "columns: 1.png, a); the first line looks like a row; it has to name the columns"),
            (",".join(f"c{number}" for number in range(99)) + "\n", "c18, c19 and 79 more); give the name"),
        ],
    )
    def test_a_missing_column_is_told_with_what_may_be_wrong(self, tmp_path: Path, text: str, remedy: str) -> None:
        """Other names, another separator, no line of names."""
        with pytest.raises(DataError) as caught:
            load_datasets(write_table(tmp_path / "t.csv", text), 0.5)
        assert remedy in caught.value.problems[0].message

    def test_classes_that_are_one_by_any_reading_are_told(self, tmp_path: Path) -> None:
        """Numbers of two programs, and names of another case; in val the one that train has is offered."""
        empty_files(tmp_path, [f"{number}.png" for number in range(8)])
        labels = ["1", "1.0", "Left Eye", "left_eye", "2", "other"]
        table = write_table(tmp_path / "t.csv", "path,label\n" + "".join(f"{index}.png,{label}\n" for index, label in enumerate(labels)))
        val = write_table(tmp_path / "v.csv", "path,label\n6.png,1\n7.png,other\n")
        found = load_datasets(table, val).findings
        assert [finding.message.partition(";")[0] for finding in found] == [
            "'1' (1 images) and '1.0' (1 images) are classes of their own",
            "'Left Eye' (1 images) and 'left_eye' (1 images) are classes of their own",
        ]
        val = write_table(tmp_path / "v.csv", "path,label\n6.png,2.0\n7.png,OTHER\n")
        with pytest.raises(DataError, match=r"'2\.0' \(1 images; did you mean '2'\?\), 'OTHER' \(1 images; did you mean 'other'\?\)"):
            load_datasets(table, val)

    def test_split_column_decides_all_splits(self, tmp_path: Path) -> None:
        """Rows go where the column says, and the share is not applied on top."""
        empty_files(tmp_path, [f"{index}.png" for index in range(4)])
        text = "path,label,part\n0.png,a,train\n1.png,b,Train\n2.png,a,validation\n3.png,b,test\n"
        found = load_datasets(write_table(tmp_path / "t.csv", text), 0.5, split_column="part")
        assert {name: names_of(found, name) for name in found.splits()} == {
            "train": ["0.png", "1.png"],
            "val": ["2.png"],
            "test": ["3.png"],
        }

    def test_share_applies_where_no_row_says_val(self, tmp_path: Path) -> None:
        """train and test from the column, validation held out of train."""
        empty_files(tmp_path, [f"{index}.png" for index in range(11)])
        rows = [f"{index}.png,{'ab'[index % 2]},{'test' if index == 10 else 'train'}\n" for index in range(11)]
        found = load_datasets(write_table(tmp_path / "t.csv", "path,label,split\n" + "".join(rows)), 0.4, split_column="split")
        assert Counter({name: len(dataset) for name, dataset in found.splits().items()}) == Counter(train=6, val=4, test=1)

    def test_unknown_split_value_is_named_with_its_row(self, tmp_path: Path) -> None:
        """A fourth split is a mistake, not something to drop."""
        empty_files(tmp_path, ["1.png"])
        with pytest.raises(DataError, match=r"t\.csv:2  'holdout' in column 'split' is not train, val or test"):
            load_datasets(write_table(tmp_path / "t.csv", "path,label,split\n1.png,a,holdout\n"), 0.5, split_column="split")

    def test_missing_columns_are_named_with_what_is_there(self, tmp_path: Path) -> None:
        """Both columns at once, with a suggestion."""
        table = write_table(tmp_path / "t.csv", "paths,klass\n1.png,a\n")
        with pytest.raises(DataError, match=r"column 'path' is missing; did you mean 'paths'\?") as caught:
            load_datasets(table, 0.5)
        assert len(caught.value.problems) == 2

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"path,label\n\xff\xfe.png,a\n", "not UTF-8"),
            (b'path,label\n"open,a\n', "not a csv table: .*a quote that opens a value has to close it"),
            (b"", "is empty; its first line names the columns"),
        ],
    )
    def test_file_that_is_no_table_is_refused(self, tmp_path: Path, content: bytes, message: str) -> None:
        """Another encoding, an open quote, an empty file."""
        (tmp_path / "t.csv").write_bytes(content)
        with pytest.raises(DataError, match=message):
            load_datasets(tmp_path / "t.csv", 0.5)

    def test_folder_with_table_settings_is_refused(self, make_folders: Callable[..., Path]) -> None:
        """A group or split column cannot be honoured for folders, so it is not ignored."""
        root = make_folders("train", {"a": 2})
        with pytest.raises(DataError, match=r"data\.group"):
            load_datasets(root, 0.5, group_column="patient")
        with pytest.raises(DataError, match=r"data\.split"):
            load_datasets(root, 0.5, split_column="split")


class TestRegions:
    """A row may mean a part of its file."""

    COLUMNS = ("x", "y", "w", "h")

    def load(self, folder: Path, rows: list[str], **options: object) -> Datasets:
        table = write_table(folder / "t.csv", "path,label,x,y,w,h,slide\n" + "".join(f"{row}\n" for row in rows))
        return load_datasets(table, 0.25, region_columns=self.COLUMNS, **options)  # type: ignore[arg-type]

    def test_a_file_is_as_many_samples_as_it_has_regions(self, tmp_path: Path) -> None:
        """Each with its own name and title, so that splits and fingerprints tell them apart."""
        empty_files(tmp_path, ["s.tif"])
        found = self.load(tmp_path, [f"s.tif,{'ab'[number % 2]},{number},0,10,20,1" for number in range(16)])
        samples = [*found.train.samples, *found.val.samples]
        assert len({sample.name for sample in samples}) == len({sample.title for sample in samples}) == 16
        assert {sample.region for sample in samples} == {Region(number, 0, 10, 20) for number in range(16)}
        assert (len(found.train), len(found.val)) == (12, 4)
        moved = self.load(tmp_path, [f"s.tif,{'ab'[number % 2]},{number},1,10,20,1" for number in range(16)])
        assert found.train.fingerprint() != moved.train.fingerprint()

    def test_groups_keep_the_regions_of_a_slide_on_one_side(self, tmp_path: Path) -> None:
        """The group's column decides, as for whole files."""
        empty_files(tmp_path, ["s.tif", "t.tif", "u.tif", "v.tif"])
        rows = [f"{name}.tif,{label},{number},0,10,20,{name}" for name in "stuv" for number, label in enumerate("abab")]
        found = self.load(tmp_path, rows, group_column="slide")
        sides = [{sample.path.name for sample in split.samples} for split in (found.train, found.val)]
        assert sides[1]
        assert not sides[0] & sides[1]

    def test_bad_numbers_and_the_same_region_twice_are_told_by_row(self, tmp_path: Path) -> None:
        """Everything at once; another region of the same file is no repetition, another spelling of its path is."""
        empty_files(tmp_path, ["s.tif"])
        rows = ["s.tif,a,0,0,10,10,1", "s.tif,b,1,0,10,10,1", "./s.tif,b,0,0,10.0,10,1", "s.tif,a,-1,0,1.5,0,1", "s.tif,a,,0,9,9,1"]
        with pytest.raises(DataError) as caught:
            self.load(tmp_path, rows)
        assert [(problem.place, problem.message.split(";")[0]) for problem in caught.value.problems] == [
            ("t.csv:4", "s.tif[0,0,10,10] is listed before, at t.csv:2 with label 'a'"),
            ("t.csv:5", "-1 in column 'x' is below 0"),
            ("t.csv:5", "'1.5' in column 'w' is not a whole number of pixels"),
            ("t.csv:5", "0 in column 'h' is below 1"),
            ("t.csv:6", "'' in column 'x' is not a whole number of pixels"),
        ]

    def test_missing_columns_are_named_with_the_key(self, tmp_path: Path) -> None:
        """And folders have no columns."""
        write_table(tmp_path / "t.csv", "path,label,x,y,w,hh\n")
        with pytest.raises(DataError, match=r"data\.region  column 'h' is missing; did you mean 'hh'"):
            load_datasets(tmp_path / "t.csv", 0.25, region_columns=self.COLUMNS)
        with pytest.raises(DataError, match=r"data\.region names the columns x, y, w, h, and .* is a folder"):
            load_datasets(tmp_path, 0.25, region_columns=self.COLUMNS)


class TestOtherTasks:
    """multilabel and regress, from tables alone."""

    def table(self, tmp_path: Path, header: str, rows: list[str], name: str = "t.csv") -> Path:
        empty_files(tmp_path, [row.split(",")[0] for row in rows])
        return write_table(tmp_path / name, "\n".join([header, *rows]))

    def test_multilabel_takes_classes_from_train_and_counts_each(self, tmp_path: Path) -> None:
        """Sorted names, one number a class, images of none among them."""
        train = self.table(tmp_path, "path,label", ["1.png,b|a", "2.png,", "3.png,c|b"])
        val = self.table(tmp_path, "path,label", ["4.png,c"], "v.csv")
        found = load_datasets(train, val, task="multilabel")
        assert found.classes == ("a", "b", "c")
        assert [sample.label for sample in found.train.samples] == [(1.0, 1.0, 0.0), (0.0, 0.0, 0.0), (0.0, 1.0, 1.0)]
        assert found.train.class_counts() == {"a": 1, "b": 2, "c": 1}
        assert found.train.target_spread() == {}

    def test_columns_are_the_classes_in_their_order(self, tmp_path: Path) -> None:
        """A column without a single 1 stays a class, with a warning; data.classes may order them anew, and must name all."""
        train = self.table(tmp_path, "path,z,a,m", ["1.png,1,0,0", "2.png,1,0,1", "3.png,0,0,1"])
        found = load_datasets(train, 0.4, task="multilabel", label_column=["z", "a", "m"])
        assert found.classes == ("z", "a", "m")
        assert any("class 'a' has no images" in finding.message for finding in found.findings)
        again = load_datasets(train, 0.4, task="multilabel", label_column=["z", "a", "m"], classes=("a", "m", "z"))
        assert {sample.name: sample.label for split in again.splits().values() for sample in split.samples}["2.png"] == (0.0, 1.0, 1.0)
        with pytest.raises(DataError, match=r"data\.classes lacks classes that train holds: a \(0 images\)"):
            load_datasets(train, 0.4, task="multilabel", label_column=["z", "a", "m"], classes=("m", "z"))

    def test_a_column_of_flags_is_no_column_of_names(self, tmp_path: Path) -> None:
        """Refused with both ways on, each of which works; a single joined, empty or other name makes names of all."""
        rows = ["1.png,1", "2.png,0", "3.png,0", "4.png,1", "5.png,0"]
        train = self.table(tmp_path, "path,flaw", rows)
        wanted = r"data\.label  column 'flaw' says 0 in 3 and 1 in 2 rows and no names; .* data\.label: \[flaw\]; .*: \[\"0\", \"1\"\]$"
        with pytest.raises(DataError, match=wanted):
            load_datasets(train, 0.4, task="multilabel", label_column="flaw")
        assert load_datasets(train, 0.4, task="multilabel", label_column=["flaw"]).classes == ("flaw",)
        assert load_datasets(train, 0.4, task="multilabel", label_column="flaw", classes=("0", "1")).classes == ("0", "1")
        for number, cell in enumerate(("0|1", "", "2")):
            more = self.table(tmp_path, "path,flaw", [*rows, f"6.png,{cell}"], f"{number}.csv")
            assert {"0", "1"} <= {*load_datasets(more, 0.4, task="multilabel", label_column="flaw").classes}

    def test_a_label_that_train_lacks_is_an_error_or_leaves_its_images_out(self, tmp_path: Path) -> None:
        """One unknown name among known ones is enough."""
        train = self.table(tmp_path, "path,label", ["1.png,a|b", "2.png,b"])
        val = self.table(tmp_path, "path,label", ["3.png,a", "4.png,a|z", "5.png,z|y"], "v.csv")
        with pytest.raises(DataError, match=r"'y' \(1 images\), 'z' \(2 images\); train has 'a', 'b'"):
            load_datasets(train, val, task="multilabel")
        found = load_datasets(train, val, task="multilabel", unseen="drop")
        assert names_of(found, "val") == ["3.png"]
        assert any("2 images dropped" in finding.message for finding in found.findings)

    def test_labels_without_a_name_are_an_error(self, tmp_path: Path) -> None:
        """All cells empty; and a class whose name could not be told from a list."""
        with pytest.raises(DataError, match="no row names a class"):
            load_datasets(self.table(tmp_path, "path,label", ["1.png,", "2.png,"]), 0.5, task="multilabel")
        table = self.table(tmp_path, "path,a|b,c", ["1.png,1,0", "2.png,1,1"])
        with pytest.raises(DataError, match=r"'a\|b' has \| in it"):
            load_datasets(table, 0.5, task="multilabel", label_column=["a|b", "c"])

    def test_targets_stay_in_their_units(self, tmp_path: Path) -> None:
        """Names, values, spread and scale; the scale is train's alone."""
        train = self.table(tmp_path, "path,age,size", ["1.png,30,0.5", "2.png,50,0.7", "3.png,40,0.6"])
        val = self.table(tmp_path, "path,age,size", ["4.png,999,0.1"], "v.csv")
        found = load_datasets(train, val, task="regress", label_column=["age", "size"])
        assert found.classes == ("age", "size")
        assert found.val.samples[0].label == (999.0, 0.1)
        assert found.train.target_spread() == {"age": [30.0, 40.0, 50.0], "size": [0.5, 0.6, 0.7]}
        assert found.train.class_counts() == {}
        assert found.train.target_scale()[0] == pytest.approx((40.0, 0.6))
        assert found.train.target_scale()[1] == pytest.approx((8.16496580927726, 0.0816496580927726))

    def test_a_target_of_one_value_is_an_error(self, tmp_path: Path) -> None:
        """There is nothing to learn, and no deviation to scale by."""
        train = self.table(tmp_path, "path,age,size", ["1.png,30,5", "2.png,50,5", "3.png,40,5"])
        with pytest.raises(DataError, match=r"data\.label  target 'size' is 5 in every row"):
            load_datasets(train, 0.4, task="regress", label_column=["age", "size"])

    @pytest.mark.parametrize("task", ["multilabel", "regress"])
    def test_class_folders_are_for_classification(self, make_folders: Callable[..., Path], task: str) -> None:
        """Refused by name, not read as one class each."""
        with pytest.raises(DataError, match=f"class folders give one class an image, and the task is {task}; give a manifest"):
            load_datasets(make_folders("train", {"a": 2, "b": 2}), 0.5, task=task)

    def test_fingerprints_follow_labels_of_every_kind(self, tmp_path: Path) -> None:
        """Another label is another set; another order of rows, or of names within a cell, is the same."""
        rows = ["1.png,a|b,1", "2.png,b,2", "3.png,a,3"]
        prints = {}
        for kind, lines in (
            ("one", rows),
            ("other", ["3.png,a,3", "1.png,b|a,1", "2.png,b,2"]),
            ("new", ["1.png,a,1", "2.png,b,2.5", rows[2]]),
        ):
            table = self.table(tmp_path, "path,label,age", lines, f"{kind}.csv")
            for task, column in (("multilabel", "label"), ("regress", "age")):
                prints[kind, task] = load_datasets(table, table, task=task, label_column=column).train.fingerprint()["sha256"]
        for task in ("multilabel", "regress"):
            assert prints["one", task] == prints["other", task] != prints["new", task]

    def test_a_share_drawn_before_is_drawn_no_more(self, tmp_path: Path) -> None:
        """With more images than then, the same names are held out and the rest trains."""
        rows = [f"{index}.png,{'ab'[index % 2]}" for index in range(20)]
        first = load_datasets(self.table(tmp_path, "path,label", rows), 0.2)
        assert first.is_drawn
        table = self.table(tmp_path, "path,label", [*rows, *(f"new{index}.png,a" for index in range(20))], "more.csv")
        again = load_datasets(table, 0.2, held_out=names_of(first, "val"))
        assert names_of(again, "val") == names_of(first, "val") != names_of(load_datasets(table, 0.2), "val")
        assert len(again.train) == len(first.train) + 20


def test_a_column_taken_by_mistake_is_told_in_a_few_words(tmp_path: Path) -> None:
    """As many classes as rows: the message counts them and stays readable."""
    empty_files(tmp_path, [f"{index}.png" for index in range(400)])
    train, val = (
        write_table(tmp_path / name, "path,label\n" + "\n".join(f"{index}.png,id{index}" for index in rows))
        for name, rows in (("t.csv", range(200)), ("v.csv", range(200, 400)))
    )
    with pytest.raises(DataError) as caught:
        load_datasets(train, val)
    assert "and 180 more; train has 'id0'" in str(caught.value)
    assert len(str(caught.value)) < 1500
