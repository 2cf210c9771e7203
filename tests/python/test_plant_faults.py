"""tools/plant_faults.py: what applies, who is said to have found a fault, table and results."""

import importlib.util
import sys

import pytest
from support import ROOT

_spec = importlib.util.spec_from_file_location("plant_faults", ROOT / "tools/plant_faults.py")
assert _spec is not None and _spec.loader is not None
plant_faults = importlib.util.module_from_spec(_spec)
sys.modules["plant_faults"] = plant_faults
_spec.loader.exec_module(plant_faults)


def fault(**fields):
    given = {"id": "one", "room": "r", "file": "src/a.cpp", "old": "a", "new": "b"}
    return plant_faults.Fault(**{**given, "test": "x_test", **fields})


def test_an_entry_applies_once():
    assert fault(old="x < y").applied("if (x < y)") == "if (b)"
    for text in ("", "a a"):
        with pytest.raises(plant_faults.Wrong, match="one: expected once in src/a.cpp, got"):
            fault().applied(text)


def test_worlds_and_costs():
    files = ["src/core/check.cpp", "python/deltic/_conv.py", "src/cpu/simd/vec-inl.h"]
    files.append("src/cuda/saved.cpp")
    found = [fault(file=name) for name in files]
    assert [f.world for f in found] == ["cpu", "torch", "cpu", "cuda"]
    assert sorted(files, key=lambda name: fault(file=name).cost) == files


@pytest.mark.parametrize(
    ("test", "text", "status", "expected"),
    [
        ("a_test:A.*", "[ RUN      ] A.B\n[  FAILED  ] A.B (0 ms)\n", 1, "a_test A.B"),
        ("a_test", "[ RUN      ] A.B\n[ RUN      ] A.C/0\n", -11, "a_test A.C/0 (exit status -11)"),
        ("a_test", "", -6, "a_test (exit status -6)"),
        ("test_a.py", "FAILED x/test_a.py::test_b[1-2] - E\n", 1, "test_a.py test_b"),
        ("quick", "The following tests FAILED:\n\t 12 - saved (Failed)\n", 8, "saved"),
    ],
)
def test_who_found_it(test, text, status, expected):
    assert plant_faults.finder(test, plant_faults.Outcome(status, text, 1.0)) == expected


def test_table_has_the_newest_result_of_each():
    faults = [fault(), fault(id="two", old="c"), fault(id="three", old="d", room="s")]

    def result(verdict, by, commit, date):
        return {"verdict": verdict, "by": by, "commit": commit, "date": f"2026-01-0{date}T00:00"}

    results = {
        f"{faults[0].digest} t1": result("survived", "", "c1", 1),
        f"{faults[0].digest} t2": result("found", "x_test X.Y", "c2", 2),
        f"{faults[1].digest} t1": result("survived", "", "c1", 1),
    }
    text = plant_faults.table(faults, results)
    assert "3 faults: 1 found, 1 not run, 1 survived." in text
    assert "| one | `src/a.cpp` | found | x_test X.Y | c2 |" in text
    assert "| two | `src/a.cpp` | survived |  | c1 |" in text
    assert "## s\n" in text and "| three | `src/a.cpp` | not run |  |  |" in text
    assert "not run" in plant_faults.table(faults, {})


def test_check_names_what_was_not_found_and_an_old_page():
    faults = [fault(), fault(id="two", old="c"), fault(id="three", old="d")]

    def result(verdict):
        return {"verdict": verdict, "by": "x_test", "commit": "c", "date": "2026-01-01T00:00"}

    results = {f"{f.digest} t": result("found") for f in faults}
    page = plant_faults.table(faults, results)
    assert plant_faults.check_results(faults, results, page) == []

    changed = [faults[0], fault(id="two", old="c", new="another"), faults[2]]
    results[f"{faults[2].digest} t"] = result("survived")
    assert plant_faults.check_results(changed, results, page) == [
        "tests/faults_results.json: expected every fault found as it is in tests/faults.toml, got "
        f"{verdict}: {name} (tools/plant_faults.py --only {name})"
        for verdict, name in (("not run", "two"), ("survived", "three"))
    ] + [
        "docs/planted_faults.md: expected what tools/plant_faults.py --table writes, got another "
        "text, that of two three among it"
    ]
