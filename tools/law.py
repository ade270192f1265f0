"""Holds the law of concurrency (docs/architecture.md) over src/: run as `python tools/law.py [FOLDER]`.

What it forbids, and where an exception stands:
- asyncio.wait, TaskGroup, ensure_future, create_task, gather, time.time, iterating over sets: outside `core`
- threads, processes and forks: outside `core` (threads) and `launch`, `bench` (spawned processes)
- anywhere: classes that inherit from Thread or Process, `__del__`, pickle, os.fork, multiprocessing's fork
A line that must break it ends in `# law: REASON`.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

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
    "asyncio.run": "use core.LoopThread",
}
BANNED_BASES = {"Thread", "Process"}
BANNED_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
SET_METHODS = {"union", "intersection", "difference", "symmetric_difference"}


class Inspector(ast.NodeVisitor):
    def __init__(self, path: Path, is_core: bool) -> None:
        self.path, self.is_core = path, is_core
        self.lines = path.read_text().splitlines()
        self.aliases: dict[str, str] = {}
        self.sets: set[str] = set()
        self.findings: list[str] = []

    def say(self, node: ast.AST, text: str) -> None:
        if "# law: " not in self.lines[node.lineno - 1]:
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
        for table in (EVERYWHERE, {} if self.is_core else OUTSIDE_CORE):
            if name in table:
                self.say(node, f"{name}: {table[name]}")
        if not self.is_core and isinstance(node.func, ast.Attribute) and node.func.attr == "create_task":
            self.say(node, "create_task: start tasks in a core.Scope")
        if name in ("list", "tuple", "enumerate", "iter", "zip", "map", "min", "max", "dict.fromkeys"):
            for argument in node.args:
                if name not in ("min", "max"):
                    self.iterates(argument)
        self.generic_visit(node)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            if self.name_of(base).split(".")[-1] in BANNED_BASES:
                self.say(node, f"class {node.name}: nothing inherits from Thread or Process")
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name == "__del__":
            self.say(node, "__del__: close in a context manager")
        for argument in (*node.args.args, *node.args.kwonlyargs):
            self.annotate(argument.arg, argument.annotation)
        self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def annotate(self, name: str, annotation: ast.AST | None) -> None:
        if annotation is not None and ast.unparse(annotation).split("[")[0] in ("set", "frozenset", "Set"):
            self.sets.add(name)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.annotate(ast.unparse(node.target), node.annotation)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if self.is_set(node.value):
            self.sets.update(ast.unparse(target) for target in node.targets)
        self.generic_visit(node)

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
        inspector = Inspector(path, is_core="core" in path.relative_to(folder).parts[:1])
        inspector.visit(ast.parse(path.read_text()))
        findings += inspector.findings
    return findings


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "src/shoal")
    findings = check(folder)
    print("\n".join(findings) or f"The law holds in {folder}.")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
