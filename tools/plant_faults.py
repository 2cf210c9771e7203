#!/usr/bin/env python3
"""Plants the faults of tests/faults.toml, one by one, into a copy of the tree and runs the tests.

A fault is found when a test fails that passes without it. First the test that should see it is
built and run; where that one passes, the whole quick set is. A fault that no test sees is a
survivor: a test is missing. Not part of CI, which only checks that the list fits the code and the
results fit the list.

  tools/plant_faults.py --check           every entry applies, its test exists and it was found;
                                          the page is that of the results; in a second
  tools/plant_faults.py --list            the entries, and what is known of them
  tools/plant_faults.py                   all of them: hours on two cores
  tools/plant_faults.py --resume          those without a result in this tree
  tools/plant_faults.py --only 'saved-*'  some of them, by name
  tools/plant_faults.py --first           what the test of each entry sees: for writing the list
  tools/plant_faults.py --table           writes docs/planted_faults.md from the results

Faults in src/cuda need nvcc and no GPU: they are those that tests see on the host, where kernels
run on an emulated GPU. Those in python/
and bindings/ need torch: --python names an interpreter that has it, pytest and hypothesis. Exit
status: 0 all found, 1 a survivor or an entry that does not apply, 2 a build or a test that fails
without any fault.
"""

import argparse
import datetime
import fnmatch
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
LIST = "tests/faults.toml"
TABLE = "docs/planted_faults.md"
RESULTS = "tests/faults_results.json"
# What neither a build nor a quick test reads: a change there is no other tree.
NOT_THE_TREE = re.compile(
    r"docs/|bench/|[^/]*\.md$|tests/faults(_results\.json|\.toml)$|tools/plant_faults\.py$"
)
WORLDS = {
    "cpu": ["-DDELTIC_CUDA=OFF"],
    "cuda": ["-DDELTIC_CUDA=ON", "-DDELTIC_CUDA_SET=ci"],
    "torch": [
        "-DDELTIC_CUDA=OFF",
        "-DDELTIC_BUILD_TORCH=ON",
        "-DDELTIC_BUILD_CLI=OFF",
        "-DDELTIC_BUILD_TESTS=OFF",
        "-DBUILD_SHARED_LIBS=OFF",
    ],
}


class Wrong(Exception):
    """The list, or a tree without faults, is not as it must be."""


@dataclass(frozen=True)
class Fault:
    """One entry: `old` stands once in `file` and becomes `new`; `test` should see it first.

    A test is `PROGRAM_test:FILTER`, `ctest:NAME`, `test_FILE.py:EXPRESSION` of pytest (the part
    behind the colon may be left out), `emulator:FILTER` (`deltic verify` of those cases on an
    emulated H200), or `compiler`.
    """

    id: str
    room: str
    file: str
    old: str
    new: str
    test: str

    @property
    def world(self) -> str:
        top = self.file.split("/")
        if top[0] in ("python", "bindings"):
            return "torch"
        return "cuda" if top[:2] == ["src", "cuda"] else "cpu"

    @property
    def digest(self) -> str:
        return digest(self.file, self.old, self.new, self.test)

    @property
    def cost(self) -> int:
        """Rank of what a rebuild takes: a source, a header of checks, all SIMD code, kernels."""
        if self.world != "cpu":
            return 1 if self.world == "torch" else 3
        return 2 if "/simd/" in self.file else 0

    def applied(self, text: str) -> str:
        if text.count(self.old) != 1:
            raise Wrong(
                f"{self.id}: expected once in {self.file}, got {text.count(self.old)} times"
            )
        return text.replace(self.old, self.new)


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def read_list() -> list[Fault]:
    entries = tomllib.loads((ROOT / LIST).read_text())["fault"]
    faults = [Fault(**entry) for entry in entries]
    names = Counter(fault.id for fault in faults)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise Wrong(f"{LIST}: expected every id once, got twice: {', '.join(twice)}")
    return faults


def check(faults: list[Fault]) -> list[str]:
    """Sentences on entries that do not apply or name a test that is not there."""
    texts: dict[str, str] = {}
    wrong = []
    programs = (ROOT / "tests/CMakeLists.txt").read_text()
    for fault in faults:
        try:
            path = ROOT / fault.file
            if fault.file not in texts:
                texts[fault.file] = path.read_text() if path.exists() else ""
            changed = fault.applied(texts[fault.file])
            if changed == texts[fault.file]:
                raise Wrong(f"{fault.id}: changes nothing")
            check_test(fault, programs)
        except Wrong as error:
            wrong.append(str(error))
    return wrong


def check_results(faults: list[Fault], results: dict[str, dict[str, str]], page: str) -> list[str]:
    """Sentences on entries that were not found as they are, and on a page of other results."""
    others: dict[str, list[str]] = {}
    for fault in faults:
        verdict = newest(fault, results)["verdict"]
        if verdict != "found":
            others.setdefault(verdict, []).append(fault.id)
    wrong = [
        f"{RESULTS}: expected every fault found as it is in {LIST}, got {verdict}: {' '.join(ids)} "
        f"(tools/plant_faults.py --only {' '.join(ids)})"
        for verdict, ids in others.items()
    ]
    expected = table(faults, results)
    if page != expected:
        rows = set(page.splitlines()) ^ set(expected.splitlines())
        ids = [fault.id for fault in faults if any(r.startswith(f"| {fault.id} |") for r in rows)]
        wrong.append(
            f"{TABLE}: expected what tools/plant_faults.py --table writes, got another text"
            + (f", that of {' '.join(ids)} among it" if ids else "")
        )
    return wrong


def check_test(fault: Fault, programs: str) -> None:
    name, _, rest = fault.test.partition(":")
    if name == "compiler" or (name == "ctest" and rest in ("abi_pairs", "abi_layout")):
        return
    if name == "emulator" and rest and fault.world == "cuda":
        return
    if name.endswith(".py"):
        if not (ROOT / "tests/python" / name).exists():
            raise Wrong(f"{fault.id}: no tests/python/{name}")
        return
    stem = name.removesuffix("_test")
    sources = [ROOT / "tests" / (name + end) for end in (".cpp", ".cu", ".c")]
    source = next((path for path in sources if path.exists()), None)
    if not name.endswith("_test") or source is None or not re.search(rf"\b{stem}\b", programs):
        raise Wrong(f"{fault.id}: no test program {name}")
    # The test's own name, without the suite and what a parameter adds, is in the source.
    for one in rest.split(":") if rest else []:
        words = [word for word in re.split(r"[/.*]", one) if len(word) > 3]
        if words and not any(word in source.read_text() for word in words):
            raise Wrong(f"{fault.id}: no test {one} in {source.name}")


def project_files() -> list[str]:
    listed = subprocess.run(
        [ROOT / "tools/list_files.sh"], capture_output=True, text=True, check=True
    )
    return listed.stdout.split()


def tree_digest(files: list[str]) -> str:
    parts = []
    for name in files:
        if not NOT_THE_TREE.match(name):
            parts += [name, hashlib.sha256((ROOT / name).read_bytes()).hexdigest()]
    return digest(*parts)


def commit() -> str:
    git = subprocess.run(
        ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return git.stdout.strip() or "unknown"


@dataclass
class Outcome:
    """How a command ended; `status` is None where it did not."""

    status: int | None
    text: str
    seconds: float

    @property
    def passed(self) -> bool:
        return self.status == 0


def run(command: list[str], log: Path, timeout: float | None = None, **more: str) -> Outcome:
    """Runs a command in a group of its own, which a timeout ends as a whole."""
    begin = time.monotonic()
    environment = {**os.environ, **more}
    with log.open("w") as out:
        out.write(shlex.join(map(str, command)) + "\n")
        out.flush()
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return Outcome(status, log.read_text(errors="replace"), time.monotonic() - begin)


@dataclass
class Workshop:
    """The copy of the tree, its builds, and what tests do there without a fault."""

    folder: Path
    python: str
    jobs: int
    ready: set[str] = field(default_factory=set)
    clean: dict[tuple[str, str], Outcome] = field(default_factory=dict)

    @property
    def tree(self) -> Path:
        return self.folder / "tree"

    def build_folder(self, world: str) -> Path:
        """Where presets have theirs: a compiler cache then knows what another tree compiled."""
        return self.tree / "build" / world

    def log(self, name: str) -> Path:
        path = self.folder / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def copy(self, files: list[str]) -> None:
        """The tree as it is here. What did not change keeps its time, and is not built again."""
        for name in files:
            data, to = (ROOT / name).read_bytes(), self.tree / name
            if not to.exists() or to.read_bytes() != data:
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_bytes(data)
                shutil.copymode(ROOT / name, to)
        known = set(files)
        for path in [p for p in self.tree.rglob("*") if p.is_file()]:
            name = str(path.relative_to(self.tree))
            if name not in known and not name.startswith("build/"):
                path.unlink()

    def configure(self, world: str) -> None:
        if world in self.ready:
            return
        folder = str(self.build_folder(world))
        command = ["cmake", "-S", str(self.tree), "-B", folder, "-G", "Ninja"]
        # A fault that the compiler warns of would not get through CI.
        command += ["-DCMAKE_BUILD_TYPE=Release", "-DDELTIC_WERROR=ON", *WORLDS[world]]
        if world == "torch":
            command += [f"-DPython_EXECUTABLE={self.python}"]
        # A restored file is compiled again: with a cache that costs nothing.
        if shutil.which("ccache"):
            languages = ["C", "CXX"] + (["CUDA"] if world == "cuda" else [])
            command += [f"-DCMAKE_{name}_COMPILER_LAUNCHER=ccache" for name in languages]
        done = run(command, self.log(f"configure-{world}"))
        if not done.passed:
            raise Wrong(f"{world}: not configured, see {self.log(f'configure-{world}')}")
        self.ready.add(world)

    def build(self, world: str, targets: list[str], log: str) -> Outcome:
        command = ["ninja", "-C", str(self.build_folder(world)), f"-j{self.jobs}", *targets]
        return run(command, self.log(log))

    def site(self) -> Path:
        """The Python package with the binding that was built."""
        site = self.folder / "site"
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(self.tree / "python/deltic", site / "deltic")
        shutil.copy(
            self.build_folder("torch") / "bindings/torch/libdeltic_torch.so", site / "deltic"
        )
        return site

    def test(self, world: str, test: str, log: str, timeout: float | None = None) -> Outcome:
        """Builds and runs one test. A build that fails has the text `not built`."""
        name, _, rest = test.partition(":")
        if name.endswith(".py"):
            built = self.build(world, ["deltic_torch"], f"{log}-build")
            command = [self.python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
            command += [str(self.tree / "tests/python" / name), *(["-k", rest] if rest else [])]
        elif name == "ctest":
            built = self.build(world, ["tests/abi/all"], f"{log}-build")
            command = ["ctest", "--test-dir", str(self.build_folder(world)), "--output-on-failure"]
            command += ["--no-tests=error", "-R", f"^{rest}$"]
        elif name == "emulator":
            built = self.build(world, ["deltic_on_emulator"], f"{log}-build")
            program = self.build_folder(world) / "tests/emulator/deltic_on_emulator"
            command = [str(program), "verify", "--device", "cuda", "--threads", "1"]
            command += ["--filter", rest]
        else:
            built = self.build(world, [name], f"{log}-build")
            command = [str(self.build_folder(world) / "tests" / name)]
            command += ["--gtest_fail_fast", f"--gtest_filter={rest or '*'}"]
        if not built.passed:
            return Outcome(1, "not built", built.seconds)
        more = {"PYTHONDONTWRITEBYTECODE": "1", "DELTIC_EMULATED_SMS": "132"}
        if world == "torch":
            more["PYTHONPATH"] = str(self.site())
            # oneDNN dies of AMX instructions on some virtual machines.
            more["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
        done = run(command, self.log(log), timeout, **more)
        # gtest passes with nothing to run, pytest has a status of its own for it.
        none_ran = (
            r"^\[  PASSED  \] 0 tests" if name.endswith("_test") else r"^no tests ran|^\d+ skipped"
        )
        if (done.passed or done.status == 5) and re.search(none_ran, done.text, re.M):
            raise Wrong(f"{test}: no such test ran, see {self.log(log)}")
        return done

    def quick(self, world: str, log: str) -> Outcome:
        """The whole quick set: of the C++ world by ctest, of the Python world all test files."""
        if world == "torch":
            tests = sorted(p.name for p in (self.tree / "tests/python").glob("test_*.py"))
            last = Outcome(0, "", 0)
            for name in tests:
                last = self.test(world, name, log)
                if not last.passed:
                    break
            return last
        built = self.build(world, ["all"], f"{log}-build")
        if not built.passed:
            return Outcome(1, "not built", built.seconds)
        command = ["ctest", "--test-dir", str(self.build_folder(world)), "-L", "quick"]
        command += [f"-j{self.jobs}", "--stop-on-failure", "--no-tests=error"]
        return run(command, self.log(log))

    def known(self, world: str, test: str) -> Outcome:
        """What a test does without a fault; it has to pass."""
        if (world, test) not in self.clean:
            log = "clean-" + re.sub(r"\W+", "-", f"{world}-{test}")[:80]
            if test == "quick":
                done = self.quick(world, log)
            elif test == "compiler":
                done = self.build(world, ["all"], log)
            else:
                done = self.test(world, test, log)
            if not done.passed:
                raise Wrong(f"{world}: {test}: fails without a fault, see {self.log(log)}")
            self.clean[world, test] = done
        return self.clean[world, test]

    def try_fault(self, fault: Fault, first_only: bool) -> tuple[str, str]:
        """(verdict, by whom or why)."""
        if fault.world == "cuda" and not shutil.which("nvcc"):
            return "not run", "no nvcc here"
        self.configure(fault.world)
        limit = 60 + 10 * self.known(fault.world, fault.test).seconds
        path = self.tree / fault.file
        before = path.read_text()
        path.write_text(fault.applied(before))
        try:
            if fault.test == "compiler":
                done = self.build(fault.world, ["all"], fault.id)
                return ("survived", "") if done.passed else ("found", "the compiler")
            done = self.test(fault.world, fault.test, fault.id, limit)
            if done.text == "not built":
                return "invalid", "it does not compile"
            if done.status is None:  # without the fault it ended in a tenth of this
                return "found", f"{fault.test} does not end"
            if not done.passed:
                return "found", finder(fault.test, done)
            if first_only:
                return "open", f"not seen by {fault.test}"
            done = self.quick(fault.world, fault.id)
            if done.passed:
                return "survived", ""
        finally:
            path.write_text(before)
        self.known(fault.world, "quick")  # it passes without the fault, else nothing was seen
        return "found", finder("quick", done)


def finder(test: str, done: Outcome) -> str:
    """The test that failed, by its own name; of one that crashed, the last that began."""
    name = test.partition(":")[0]
    wrong = re.search(r"^FAIL (\S+)", done.text, re.M)
    fault = re.search(r"^emulated GPU: (.+)", done.text, re.M)
    if name == "emulator":
        by = wrong[1] if wrong else fault[1] if fault else f"exit status {done.status}"
        return f"verify on the emulator: {by}"
    failed = re.search(r"^\[  FAILED  \] ([\w./]+)", done.text, re.M)
    began = re.findall(r"^\[ RUN      \] ([\w./]+)", done.text, re.M)
    pytest = re.search(r"^(?:FAILED|ERROR) \S*?(test_\w+\.py(?:::\w+)*)", done.text, re.M)
    ctest = re.search(r"^\s*\d+ - (\w+) \(", done.text, re.M)
    if pytest:
        return pytest[1].replace("::", " ", 1)
    if failed:
        return f"{name} {failed[1]}"
    if ctest:
        return ctest[1]
    return f"{name} {began[-1] if began else ''} (exit status {done.status})".replace("  ", " ")


def load_results(path: Path) -> dict[str, dict[str, str]]:
    return json.loads(path.read_text()) if path.exists() else {}


def results_of(fault: Fault, results: dict[str, dict[str, str]]) -> list[dict[str, str]]:
    """The fault's results, the newest last."""
    mine = [r for key, r in results.items() if key.startswith(fault.digest + " ")]
    return sorted(mine, key=lambda r: r["date"])


def newest(fault: Fault, results: dict[str, dict[str, str]]) -> dict[str, str]:
    """The fault's last result; one without a date where there is none."""
    none = {"verdict": "not run", "by": "", "commit": "", "date": ""}
    return (results_of(fault, results) or [none])[-1]


def table(faults: list[Fault], results: dict[str, dict[str, str]]) -> str:
    """The paper: what was planted where, and who saw it."""
    last = {fault.id: newest(fault, results) for fault in faults}
    verdicts = Counter(r["verdict"] for r in last.values())
    dates = sorted({r["date"][:10] for r in last.values() if r["date"]})
    lines = [
        "# Planted faults",
        "",
        "Generated by `tools/plant_faults.py --table` from the results of `tools/plant_faults.py`. "
        f"[{LIST}](../{LIST}) has the faults, word for word. Each is planted alone into a copy of "
        "the tree, which is built and tested: a fault that no test sees means that one is missing.",
        "",
        f"{len(faults)} faults: "
        + ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
        + f". Date {' to '.join([dates[0], dates[-1]] if len(dates) > 1 else dates)}; on a machine "
        "without a GPU. A result stays until its fault, or the line it is planted in, is another.",
        "",
    ]
    rooms = list(dict.fromkeys(fault.room for fault in faults))
    for room in rooms:
        lines += [f"## {room}", ""]
        lines += ["| fault | file | verdict | by | commit |", "| --- | --- | --- | --- | --- |"]
        for fault in (f for f in faults if f.room == room):
            found = last[fault.id]
            cells = [fault.id, f"`{fault.file}`", found["verdict"], found["by"], found["commit"]]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def selected(faults: list[Fault], patterns: list[str]) -> list[Fault]:
    chosen = [f for f in faults if any(fnmatch.fnmatch(f.id, p) for p in patterns)]
    if not chosen:
        raise Wrong(f"--only: expected the name of a fault or a pattern, got {' '.join(patterns)}")
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only look whether all of it fits")
    parser.add_argument("--list", action="store_true", help="print the list and what is known")
    parser.add_argument("--table", action="store_true", help=f"write {TABLE} from the results")
    parser.add_argument("--resume", action="store_true", help="skip what has a result in this tree")
    parser.add_argument(
        "--earlier", action="store_true", help="with --resume: also what was found in another tree"
    )
    parser.add_argument(
        "--first", action="store_true", help="only the test that should see it, not the quick set"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="faults by name, with * and ?")
    parser.add_argument("--work", default="build/faults", help="folder of the copy and its builds")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with torch")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()

    every = read_list()
    store = ROOT / RESULTS
    results = load_results(store)
    wrong = check(every)
    if options.check:
        page = ROOT / TABLE
        wrong += check_results(every, results, page.read_text() if page.exists() else "")
    for line in wrong:
        print(line)
    rooms = {fault.room for fault in every}
    print(f"{len(every)} planted faults in {len(rooms)} rooms, {len(wrong)} wrong")
    if wrong or options.check:
        return 1 if wrong else 0
    faults = selected(every, options.only) if options.only else every
    folder = Path(options.work) if os.path.isabs(options.work) else ROOT / options.work
    if options.table:
        (ROOT / TABLE).write_text(table(every, results))
        return 0
    if options.list:
        for fault in faults:
            last = newest(fault, results)
            print(f"{fault.id:36} {fault.room:16} {last['verdict']:9} {last['by']}")
        return 0

    files = project_files()
    tree, at = tree_digest(files), commit()
    if options.resume:

        def is_done(fault: Fault) -> bool:
            here = results.get(f"{fault.digest} {tree}")
            old = results_of(fault, results)
            return here is not None or (
                options.earlier and bool(old) and old[-1]["verdict"] == "found"
            )

        faults = [fault for fault in faults if not is_done(fault)]
    workshop = Workshop(folder, options.python, options.jobs)
    workshop.copy(files)
    bad = 0
    for number, fault in enumerate(sorted(faults, key=lambda f: f.cost), 1):
        begin = time.monotonic()
        verdict, by = workshop.try_fault(fault, options.first)
        seconds = time.monotonic() - begin
        print(f"[{number}/{len(faults)}] {fault.id}: {verdict} {by} ({seconds:.0f} s)", flush=True)
        bad += verdict not in ("found", "not run")
        if verdict == "open":
            continue
        results[f"{fault.digest} {tree}"] = {
            "id": fault.id,
            "verdict": verdict,
            "by": by,
            "commit": at,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": f"{seconds:.0f}",
        }
        store.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{len(faults)} planted, {bad} not found")
    return 1 if bad else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Wrong as error:
        print(error)
        sys.exit(2)
