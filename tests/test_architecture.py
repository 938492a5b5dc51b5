"""The plan of the house holds: imports point down, never in a circle, and heavy packages stay in their rooms."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "agentscope_tuner"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

FLOORS: dict[str, float] = {
    "errors": 0,
    "event_loop": 0,
    "garbage": 0,
    "types": 1,
    "config": 2,
    "policy": 2,
    "chat": 3,
    "readers": 3,
    "judges": 3,
    "algorithms": 3,
    "reporting": 3,
    "loading": 3,
    "opponents": 3,
    "engine": 4,
    "recorder": 5.0,
    "agentscope_face": 5.1,
    "many_agents": 5.1,
    "endpoint": 5.1,
    "tinker_service": 5.1,
    "model_tuner": 5.2,
    "workflow": 6,
    "rollout": 7,
    "testing": 8,
    "backends": 8,
    "tune": 9,
    "evaluate": 9,
    "doctor": 9,
    "cli": 10,
    "__init__": 11,
}
"""Room to floor. A room is a module, or a directory of modules, directly below the package."""

ALLOWED_ROOMS: dict[str, set[str]] = {
    "torch": {"algorithms", "engine", "tinker_service", "backends"},
    "agentscope": {"agentscope_face", "many_agents", "model_tuner", "workflow", "testing"},
    "trinity": {"backends"},
    "tinker": {"backends", "tinker_service"},
    "ray": {"backends"},
    "starlette": {"endpoint", "tinker_service"},
    "uvicorn": {"endpoint", "tinker_service"},
    "uvloop": {"event_loop"},
}
"""Packages of others that only these rooms may import, not even lazily anywhere else."""

LAZY_ROOMS: dict[str, set[str]] = {"torch": {"doctor"}}
"""Rooms that may import such a package too, but only inside functions: a doctor has to find that it is missing."""


@dataclass(frozen=True)
class Import:
    """One imported name, as written at one place."""

    module: str
    """The module that imports."""
    target: str
    """Absolute dotted name of what is imported: a module, or a name in one."""
    place: str
    """`file:line`, for messages."""
    lazy: bool
    """Whether it is inside a function."""


def find_modules(root: Path) -> dict[str, Path]:
    """Dotted name to file, for every module below the package directory `root`."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join([PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)])] = path
    return modules


def room_of(module: str) -> str:
    """`agentscope_tuner.engine.sampler` is in `engine`; the package itself is the room `__init__`."""
    _, _, inner = module.partition(".")
    return inner.partition(".")[0] or "__init__"


def statements(tree: ast.AST, lazy: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node that can run, and whether it is inside a function.

    The body of `if TYPE_CHECKING:` never runs, so what it imports makes no edge: a record may name a type that
    lives on its own floor or above. Its `else` does run.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from statements(ast.Module(body=node.orelse, type_ignores=[]), lazy)
        else:
            yield node, lazy
            yield from statements(node, lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def find_imports(module: str, path: Path, root: Path) -> Iterator[Import]:
    """What `module` imports; `import_module("name")` and `__import__("name")` count when the name is literal."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node, lazy in statements(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        match node:
            case ast.Import():
                targets = [alias.name for alias in node.names]
            case ast.ImportFrom():
                # One leading dot means the module's own package, each further one its parent.
                base = package[: len(package) - node.level + 1] if node.level else []
                source = [*base, node.module] if node.module else base
                targets = [".".join([*source, alias.name]) for alias in node.names]
            case ast.Call(
                func=ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(str(name)), *_],
            ):
                targets = [name]
            case _:
                continue
        place = f"{path.relative_to(root)}:{node.lineno}"
        yield from (Import(module, target, place, lazy) for target in targets)


def find_violations(root: Path) -> list[str]:
    """Every breach of the plan in the package directory `root`, as messages."""
    modules = find_modules(root)
    violations = [
        f"`{room}` is on no floor; add it to FLOORS in {Path(__file__).name}"
        for room in sorted({room_of(module) for module in modules} - set(FLOORS))
    ]
    violations += [
        f"`{module}` says nothing about what is inside; give it the name of its duty"
        for module in modules
        if {part.strip("_") for part in module.split(".")} & {"util", "utils"}
    ]
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for item in (item for module, path in modules.items() for item in find_imports(module, path, root)):
        room, package = room_of(item.module), item.target.partition(".")[0]
        late = item.lazy and room in LAZY_ROOMS.get(package, set())
        if package in ALLOWED_ROOMS and room not in ALLOWED_ROOMS[package] and not late:
            rooms = ", ".join(f"`{name}`" for name in sorted(ALLOWED_ROOMS[package]))
            violations.append(f"{item.place}: `{package}` may be imported only in {rooms}, not in `{room}`")
        if package != PACKAGE:
            continue
        target = item.target
        while target not in modules and target != PACKAGE:  # a name inside a module, or no module at all
            target = target.rpartition(".")[0]
        graph[item.module].add(target)
        below = room_of(target)
        if room != below and {room, below} <= FLOORS.keys() and FLOORS[below] >= FLOORS[room]:
            violations.append(
                f"{item.place}: `{room}` (floor {FLOORS[room]:g}) imports `{below}` (floor {FLOORS[below]:g}); "
                "imports must point to a lower floor"
            )
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        # graphlib lists predecessors first; here a node's predecessors are what it imports.
        violations.append(f"import cycle: {' -> '.join(reversed(error.args[1]))}")
    return violations


def test_imports_follow_the_plan() -> None:
    assert len(find_modules(SOURCE)) > 1, f"no modules found in {SOURCE}"
    violations = find_violations(SOURCE)
    assert not violations, "\n" + "\n".join(violations)


# ------------------------------------------------------------------------------------------- the checker, checked


def build(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"__init__.py": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_checker_accepts_a_sound_tree(tmp_path: Path) -> None:
    root = build(
        tmp_path,
        {
            "__init__.py": "from agentscope_tuner.tune import tune\nfrom . import errors",
            "errors.py": "import typing\nif typing.TYPE_CHECKING:\n    import torch\n    from .tune import tune",
            "engine/__init__.py": "from agentscope_tuner.engine.sampler import sample",
            "engine/sampler.py": "import torch.nn\nfrom ..errors import TunerError\nfrom .cache import Cache",
            "engine/cache.py": "import torch",
            "agentscope_face.py": "import agentscope.model",
            "doctor.py": "def f():\n    import torch\n    with torch.no_grad():\n        import torch.cuda",
            "tune.py": "from agentscope_tuner import errors\nimport agentscope_tuner.engine.sampler",
        },
    )
    assert find_violations(root) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param(
            {
                "engine/a.py": "from agentscope_tuner.engine.b import b",
                "engine/b.py": "from agentscope_tuner.engine import c",
                "engine/c.py": "def late():\n    from . import a",
            },
            "agentscope_tuner.engine.a -> agentscope_tuner.engine.b",
            id="cycle",
        ),
        pytest.param(
            {"engine/__init__.py": "from .a import f", "engine/a.py": "from agentscope_tuner.engine import LIMIT"},
            "import cycle: agentscope_tuner.engine",
            id="cycle through the package of the room",
        ),
        pytest.param(
            {"config.py": "X = 1\nfrom agentscope_tuner.tune import tune", "tune.py": ""},
            "config.py:2: `config` (floor 2) imports `tune` (floor 9)",
            id="upward",
        ),
        pytest.param(
            {"config.py": "async def f():\n    from . import tune", "tune.py": ""},
            "config.py:2: `config` (floor 2) imports `tune` (floor 9)",
            id="upward, relative, inside a function",
        ),
        pytest.param(
            {"chat/parse.py": "from ..judges.exact import f", "judges/exact.py": ""},
            "parse.py:1: `chat` (floor 3) imports `judges` (floor 3)",
            id="sideways",
        ),
        pytest.param(
            {"agentscope_face.py": "from agentscope_tuner import model_tuner", "model_tuner.py": ""},
            "`agentscope_face` (floor 5.1) imports `model_tuner` (floor 5.2)",
            id="upward within floor 5",
        ),
        pytest.param(
            {"rollout.py": "from agentscope_tuner import tune"},
            "`rollout` (floor 7) imports `__init__` (floor 11)",
            id="through the public door",
        ),
        pytest.param(
            {"errors.py": "if TYPE_CHECKING:\n    pass\nelse:\n    from agentscope_tuner import types", "types.py": ""},
            "errors.py:4: `errors` (floor 0) imports `types` (floor 1)",
            id="the else of TYPE_CHECKING",
        ),
        pytest.param(
            {"cli.py": "def f():\n    import torch.cuda"},
            "cli.py:2: `torch` may be imported only in `algorithms`, `backends`, `engine`, `tinker_service`, not in "
            "`cli`",
            id="lazy torch",
        ),
        pytest.param(
            {"doctor.py": "import importlib\nimportlib.import_module('torch')"},
            "doctor.py:2: `torch` may be imported only in",
            id="torch through importlib",
        ),
        pytest.param(
            {"doctor.py": "try:\n    import torch\nexcept ImportError:\n    pass"},
            "doctor.py:2: `torch` may be imported only in",
            id="torch in the doctor, but not inside a function",
        ),
        pytest.param(
            {"judges/llm.py": "from agentscope.message import Msg"},
            "llm.py:1: `agentscope` may be imported only in `agentscope_face`, `many_agents`, `model_tuner`, "
            "`testing`, `workflow`",
            id="agentscope",
        ),
        pytest.param({"engine/_utils.py": ""}, "`agentscope_tuner.engine._utils` says nothing", id="utils"),
        pytest.param({"attic.py": ""}, "`attic` is on no floor; add it to FLOORS", id="unknown room"),
    ],
)
def test_checker_finds(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    (violation,) = find_violations(build(tmp_path, files))
    assert expected in violation
