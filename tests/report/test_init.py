import subprocess
import sys

import shoal.report


def test_every_public_name_exists_and_is_sorted_into_all():
    assert all(hasattr(shoal.report, name) for name in shoal.report.__all__)
    for name in (
        "Report",
        "Row",
        "load",
        "save",
        "default_path",
        "percentile",
        "summarize",
        "Diff",
        "compare",
    ):
        assert name in shoal.report.__all__


def test_reading_and_comparing_load_neither_torch_nor_numpy_nor_plotly():
    heavy = "{'torch', 'numpy', 'plotly', 'rich'} & set(sys.modules)"
    code = f"import sys, shoal.report, shoal.report.views, shoal.report.diff; print(sorted({heavy}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
