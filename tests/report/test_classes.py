"""The tables of a classifier's results."""

from report.printed import printed

from hwopt.report.classes import SCREEN, class_sheet, class_sheets, confusion_sheet, show_classes


def scores(label: str, f1: float, support: int = 3) -> dict[str, object]:
    return {"label": label, "precision": f1, "recall": f1, "f1": f1, "support": support}


def test_of_many_classes_the_worst_are_shown_first() -> None:
    sheet = class_sheet([scores(f"class{number}", number / 100) for number in range(50, 0, -1)], "test")
    assert [row[0] for row in sheet.rows] == [f"class{number}" for number in range(1, SCREEN.classes + 1)]
    assert sheet.note == "the 20 classes with the lowest F1, of 50"


def test_a_wide_confusion_matrix_becomes_a_list_of_its_most_frequent_errors() -> None:
    labels = [f"label{number}" for number in range(SCREEN.columns + 1)]
    rows = [[9 if true == predicted else 0 for predicted in range(len(labels))] for true in range(len(labels))]
    rows[2][3], rows[4][1] = 1, 5
    sheet = confusion_sheet(labels, rows)
    assert sheet.rows == [("label4", "label1", "5"), ("label2", "label3", "1")]
    assert sheet.note == ""
    many = confusion_sheet(labels, [[1] * len(labels) for _ in labels])
    assert len(many.rows) == SCREEN.classes
    assert many.note == "the 20 most frequent of 30 confusions"


def test_each_target_of_a_regression_has_a_row() -> None:
    targets = [{"target": "size", "mse": 0.25, "pearson": None}, {"target": "price", "mse": 12_345.0, "pearson": 0.5}]
    (sheet,) = class_sheets({"targets": targets}, "test")
    assert sheet.columns == ("target", "mse", "pearson")
    assert sheet.rows == [("size", "0.25", "-"), ("price", "1.234e+04", "0.5")]


def test_the_widest_tables_fit_80_columns() -> None:
    labels = ["a very long label number " + str(number) for number in range(SCREEN.columns)]
    details = {
        "classes": [scores(label, 0.5, 1_234_567) for label in labels],
        "confusion_matrix": {"labels": labels, "rows": [[99_999] * len(labels)] * len(labels)},
    }
    shown = printed(lambda console: show_classes(console, details, "evaluation, best weights"), 80)
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("99,999") == len(labels) ** 2
    assert shown.count("1,234,567") == len(labels)
