"""Holds the law of concurrency (docs/architecture.md) over src/: run as `python tools/law.py [FOLDER]`.

What it forbids, and where an exception stands:
- asyncio.wait, TaskGroup, ensure_future, create_task, gather, time.time, iterating over sets: outside `core`
- threads, processes and forks: outside `core` (threads) and `launch`, `bench` (spawned processes)
- anywhere: classes that inherit from Thread or Process, `__del__`, pickle, os.fork, multiprocessing's fork
It reads names, not types: a set that comes out of a call or a table is not seen.
An expression that must break it has `# law: REASON` at the end of one of its lines.

It also holds counts of what makes the code hard to read, which may only fall (tools/ratchet.json): public
class names that stand twice, docstrings of three words or fewer on public names, folders over twenty files
(but for `strategies`, which has one for each algorithm).
"""

from __future__ import annotations

import ast
import collections
import json
import sys
from collections.abc import Iterator
from pathlib import Path

RATCHET = Path(__file__).with_name("ratchet.json")
MAX_FILES = 20
ONE_FILE_EACH = ("strategies",)
"""Folders that have a file for each of many alike, and so may have any number."""
FEW_WORDS = 3

EVERYWHERE = {
    "pickle.load": "nothing unpickles",
    "pickle.loads": "nothing unpickles",
    "torch.load": "nothing unpickles; use safetensors",
    "os.fork": "spawn, never fork",
    "asyncio.get_event_loop": "pass the loop in",
}
OUTSIDE_CORE = {
    "asyncio.wait": "use core.fanout",
    "asyncio.TaskGroup": "use core.Scope: TaskGroup cancels in order of memory address",
    "asyncio.ensure_future": "start tasks in a core.Scope",
    "asyncio.create_task": "start tasks in a core.Scope",
    "asyncio.gather": "use core.fanout",
    "asyncio.as_completed": "use core.fanout",
    "time.time": "use a core.Clock",
    "threading.Thread": "use core.LoopThread",
    "threading.Timer": "use core.LoopThread",
    "concurrent.futures.ThreadPoolExecutor": "use core.LoopThread",
    "asyncio.run": "use core.LoopThread",
}
OUTSIDE_LAUNCH = dict.fromkeys(
    (
        "asyncio.create_subprocess_exec",
        "asyncio.create_subprocess_shell",
        "concurrent.futures.ProcessPoolExecutor",
        "multiprocessing.Pool",
        "multiprocessing.Process",
        "os.system",
        "subprocess.Popen",
        "subprocess.call",
        "subprocess.check_call",
        "subprocess.check_output",
        "subprocess.run",
        "torch.multiprocessing.Process",
        "torch.multiprocessing.spawn",
    ),
    "only launch, bench and doctor start processes",
)
START_METHODS = ("get_context", "set_start_method")
ITERATORS = ("list", "tuple", "enumerate", "iter", "zip", "map", "filter", "sum", "dict.fromkeys")
BANNED_BASES = {"Thread", "Process"}
BANNED_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
SET_METHODS = {"union", "intersection", "difference", "symmetric_difference"}


class Inspector(ast.NodeVisitor):
    def __init__(self, path: Path, room: str) -> None:
        self.path, self.is_core = path, room == "core"
        self.tables = [EVERYWHERE]
        if not self.is_core:
            self.tables.append(OUTSIDE_CORE)
        if room not in ("launch", "bench", "doctor"):
            self.tables.append(OUTSIDE_LAUNCH)
        self.lines = path.read_text().splitlines()
        self.aliases: dict[str, str] = {}
        self.sets: set[str] = set()
        self.findings: list[str] = []

    def say(self, node: ast.AST, text: str) -> None:
        # a statement that the formatter breaks into lines carries its reason on the last one
        last = (node.end_lineno or node.lineno) if isinstance(node, ast.expr) else node.lineno
        if not any("# law: " in line for line in self.lines[node.lineno - 1 : last]):
            self.findings.append(f"{self.path}:{node.lineno}: {text}")

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.aliases[alias.asname or alias.name] = alias.name
            if alias.name.split(".")[0] in BANNED_IMPORTS:
                self.say(node, f"{alias.name}: nothing unpickles")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self.aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        if (node.module or "").split(".")[0] in BANNED_IMPORTS:
            self.say(node, f"{node.module}: nothing unpickles")

    def name_of(self, node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            return f"{self.name_of(node.value)}.{node.attr}"
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        return ""

    def visit_Call(self, node: ast.Call) -> None:
        name = self.name_of(node.func)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        reasons = [table[name] for table in self.tables if name in table and name != "time.time"]
        for reason in reasons:
            self.say(node, f"{name}: {reason}")
        if not self.is_core and method == "create_task" and not reasons:
            self.say(node, "create_task: start tasks in a core.Scope")
        is_start_method = "multiprocessing" in name and name.split(".")[-1] in START_METHODS
        if is_start_method and [ast.unparse(argument) for argument in node.args[:1]] != ["'spawn'"]:
            self.say(node, f"{name}: spawn, never fork: say 'spawn'")
        if name in ITERATORS or method in ("join", "extend"):
            for argument in node.args:
                self.iterates(argument)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute | ast.Name) -> None:
        # not its calls alone: it is passed on as a clock
        if not self.is_core and self.name_of(node) == "time.time" and isinstance(node.ctx, ast.Load):
            self.say(node, f"time.time: {OUTSIDE_CORE['time.time']}")
        self.generic_visit(node)

    visit_Name = visit_Attribute

    def visit_Starred(self, node: ast.Starred) -> None:
        self.iterates(node.value)
        self.generic_visit(node)

    def visit_YieldFrom(self, node: ast.YieldFrom) -> None:
        self.iterates(node.value)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            if self.name_of(base).split(".")[-1] in BANNED_BASES:
                self.say(node, f"class {node.name}: nothing inherits from Thread or Process")
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name == "__del__":
            self.say(node, "__del__: close in a context manager")
        outside = set(self.sets)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            self.sets.discard(argument.arg)
            self.annotate(argument.arg, argument.annotation)
        self.generic_visit(node)
        self.sets = outside | {name for name in self.sets if "." in name}

    visit_AsyncFunctionDef = visit_FunctionDef

    def annotate(self, name: str, annotation: ast.AST | None) -> None:
        if annotation is not None and ast.unparse(annotation).split("[")[0] in ("set", "frozenset", "Set"):
            self.sets.add(name)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.annotate(ast.unparse(node.target), node.annotation)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)  # first: the value is read before the name changes its meaning
        for name in map(ast.unparse, node.targets):
            if self.is_set(node.value):
                self.sets.add(name)
            elif "." not in name:
                self.sets.discard(name)

    def is_set(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Set | ast.SetComp):
            return True
        if isinstance(node, ast.Call):
            if self.name_of(node.func) in ("set", "frozenset"):
                return True
            return isinstance(node.func, ast.Attribute) and node.func.attr in SET_METHODS
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub):
            return self.is_set(node.left) or self.is_set(node.right)
        return isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in self.sets

    def iterates(self, node: ast.AST) -> None:
        if not self.is_core and self.is_set(node):
            self.say(node, "iterates over a set: its order differs from run to run; use a dict or sort it")

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.iterates(node.iter)
        self.generic_visit(node)

    visit_AsyncFor = visit_For

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.iterates(node.iter)
        self.generic_visit(node)


def check(folder: Path) -> list[str]:
    findings: list[str] = []
    for path in sorted(folder.rglob("*.py")):
        inspector = Inspector(path, room=path.relative_to(folder).parts[0])
        inspector.visit(ast.parse(path.read_text()))
        findings += inspector.findings
    return findings


def hard_to_read(folder: Path) -> dict[str, list[str]]:
    """Lists, by kind, what the ratchet counts."""
    classes: dict[str, list[str]] = collections.defaultdict(list)
    short: list[str] = []
    files: collections.Counter[str] = collections.Counter()
    for path in sorted(folder.rglob("*.py")):
        files[str(path.parent)] += 1
        for name, node in _public(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and "." not in name:
                classes[name].append(str(path))
            text = ast.get_docstring(node)
            if text is not None and len(text.split()) <= FEW_WORDS:
                short.append(f"{path}:{node.lineno}: {name}: {text}")
    return {
        "class names that stand twice": [f"{n}: {', '.join(p)}" for n, p in classes.items() if len(p) > 1],
        "docstrings of three words or fewer": short,
        "folders over twenty files": [
            f"{n}: {num}" for n, num in files.items() if num > MAX_FILES and Path(n).name not in ONE_FILE_EACH
        ],
    }


def _public(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("_"):
                continue
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _public(node, f"{prefix}{node.name}.")


def check_ratchet(folder: Path, allowed: dict[str, int]) -> list[str]:
    """Says which counts have risen, with all that is counted, so that what is new can be found."""
    findings = []
    for kind, found in hard_to_read(folder).items():
        if len(found) > allowed[kind]:
            findings += [
                *found,
                f"{len(found)} {kind}, where {allowed[kind]} were: the number may only fall.",
            ]
        elif len(found) < allowed[kind]:
            print(
                f"{kind}: {len(found)}, where {allowed[kind]} were. Write {len(found)} into {RATCHET.name}."
            )
    return findings


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "src/shoal")
    findings = check(folder)
    if len(sys.argv) < 2 or folder == Path("src/shoal"):
        findings += check_ratchet(folder, json.loads(RATCHET.read_text()))
    print("\n".join(findings) or f"The law holds in {folder}.")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
