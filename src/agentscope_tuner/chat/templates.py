"""What a chat template writes for a conversation, without writing again what it wrote for the beginning of it.

A template is a program that writes a whole prompt, and that of a long conversation takes longer than anything else that
is done about a call. Most of it is a loop over the messages, and most loops write for each message what depends on that
message and its neighbours alone. Where the program says so, later prompts only run the last rounds of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.visitor import NodeTransformer

_MARK = "\ue002message\ue003"
"""Comes before what is written for a message, and after the last one."""
_RUN, _START = "run__", "start__"
"""Names that are added to a program, ..."""
_REST, _READ, _AT = "rest__", "read__", "at__"
"""... and filters, which are not looked at each time whether they may be called."""
_OF_DICTS = frozenset(dir(dict))
_OF_A_ROUND = {"index", "index0", "first", "last", "nextitem"}
"""What a round may ask of its loop: of those before the last two, all of it stays when messages follow."""
_UNSTEADY = {"strftime_now", "lipsum"}
_JSON_TEXTS = 256
"""So many are remembered, with what they were written for."""
_STATEMENTS = (nodes.Output, nodes.If, nodes.For, nodes.Assign, nodes.AssignBlock, nodes.Continue, nodes.Break)


class _Unlike(Exception):
    """Later prompts may not begin with what was written for earlier ones."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What was written for some messages."""

    head: str
    last: str
    """By the last round of the loop: what follows may change it."""
    end: str
    read: list[Any]
    """Whatever rounds read that is neither a message nor of the loop."""
    before: int
    """How many messages are not in the loop: those at the beginning."""


@dataclass(slots=True)
class _Run:
    """One run of a template, which must not see what is in it."""

    _messages: Sequence[Any]
    _environment: Environment
    _start: int
    """The first round that is run."""
    _expected: Parts | None
    _before: int = 0
    _read: list[Any] | None = None

    def rest(self, looped: Any) -> Any:
        """The messages of the rounds that are run."""
        self._before = len(self._messages) - len(looped)
        aligned = self._before >= 0 and all(map(is_, looped, self._messages[self._before :]))
        if not aligned or (self._expected is not None and self._before != self._expected.before):
            raise _Unlike
        return looped[self._start :]

    def note(self, *read: Any) -> str:
        """What rounds are about to read."""
        self._read = [*read]
        expected = self._read if self._expected is None else self._expected.read
        if self._read != expected or [*map(type, self._read)] != [*map(type, expected)]:
            raise _Unlike
        return ""

    def at(self, messages: Any, index: int) -> Any:
        """A message by its place. Before the first one there is, to Python, the last one."""
        if index < 0:
            raise _Unlike
        return self._environment.getitem(messages, index)

    def parts(self, head: str, rounds: list[str], end: str) -> Parts | None:
        """What was written; None where that cannot be said, since a message may be just the mark."""
        if not rounds or self._read is None or len(rounds) != len(self._messages) - self._before - self._start:
            return None
        return Parts(head, rounds[-1], end, self._read, self._before)


class TurnTemplate:
    """A template with a loop over messages, each round of which depends on a message and its neighbours."""

    @classmethod
    def of(cls, source: str) -> TurnTemplate | None:
        """The template of this text; None where it has no such loop, or that cannot be said."""
        try:
            # Templates are programs of strangers, and this is the sandbox that they are run in.
            from transformers.utils.chat_template_utils import _compile_jinja_template

            return cls(_with_added(_compile_jinja_template(source).environment), source)
        except (ImportError, AttributeError, TemplateError, ValueError):
            return None

    def __init__(self, environment: Environment, source: str) -> None:
        """Prepare to run its rounds apart.

        Raises:
            TemplateError: it cannot be read.
            ValueError: it has no such loop, or that cannot be said.
        """
        tree = environment.parse(source)
        if any(name.name in (_RUN, _START) for name in tree.find_all(nodes.Name)):
            raise ValueError("the names that are added")
        loops = [node for node in tree.body if isinstance(node, nodes.For) and node.find(nodes.Output)]
        if not loops:
            raise ValueError("no loop")
        loop = loops[-1]
        reader = _Reader(tree, loop)
        self._needed = reader.needed
        loop.iter = _filtered(_REST, loop.iter)
        loop.body = [_written(nodes.TemplateData(_MARK)), *(_Numbered(reader.messages).visit(n) for n in loop.body)]
        at = tree.body.index(loop)
        tree.body[at : at + 1] = [
            _written(_filtered(_READ, *reader.read)), loop, _written(nodes.TemplateData(_MARK))
        ]  # fmt: skip
        tree.set_environment(environment)
        for node in tree.find_all(nodes.Node):  # what was added has no line
            node.lineno = getattr(node, "lineno", None) or 1
        code = environment.compile(tree)
        self._environment = environment
        names = dict(environment.make_globals(None))  # a dict is read in a fraction of the time
        self._template = environment.template_class.from_code(environment, code, names)

    def write(
        self, messages: Sequence[Any], variables: Mapping[str, Any], known: int = 0, expected: Parts | None = None
    ) -> tuple[str, Parts] | None:
        """The text for all messages, and its parts; or, where parts were written for the first few, what follows these.

        None where that cannot be said.
        """
        start = 0
        if expected is not None:
            if known - expected.before < self._needed:
                return None
            start = known - 1 - expected.before
        run = _Run(messages, self._environment, start, expected)
        added = {_RUN: run, _START: start}
        try:
            head, *rounds, end = _split(self._template.generate(messages=messages, **variables, **added))
        except (_Unlike, TemplateError, TypeError, ValueError):
            return None  # whoever writes all of it hears of what is wrong
        parts = run.parts(head, rounds, end)
        if parts is None:
            return None
        if expected is None:
            return head + "".join(rounds) + end, parts
        if head != expected.head or rounds[0] != expected.last:
            return None
        return "".join(rounds[1:]) + end, parts


def _with_added(environment: Environment) -> Environment:
    """With our filters, and quick where nearly all time goes: what messages and tools hold, and tools as JSON."""
    quick = environment.overlay()
    to_json = _remembering(environment.filters["tojson"])
    quick.filters = {**environment.filters, "tojson": to_json, _REST: _Run.rest, _READ: _Run.note, _AT: _Run.at}

    def getattr_of(value: Any, name: str) -> Any:
        if type(value) is not dict or name in _OF_DICTS:
            return environment.getattr(value, name)
        return value[name] if name in value else environment.undefined(obj=value, name=name)

    vars(quick)["getattr"] = getattr_of
    return quick


def _remembering(to_json: Callable[..., str]) -> Callable[..., str]:
    """The same filter, which writes what it wrote before: a run's tools are the same objects at every call."""
    if vars(to_json):  # it may be told more than the value
        return to_json
    known: dict[Any, tuple[Any, str]] = {}

    def remember(value: Any, *args: Any, **options: Any) -> str:
        key = id(value), args, *options.items()
        if key not in known:
            if len(known) == _JSON_TEXTS:
                known.clear()
            known[key] = value, to_json(value, *args, **options)
        return known[key][1]

    return remember


def _split(pieces: Iterator[str]) -> list[str]:
    """Texts between marks."""
    texts: list[list[str]] = [[]]
    for piece in pieces:
        if piece == _MARK:
            texts.append([])
        else:
            texts[-1].append(piece)
    return ["".join(text) for text in texts]


class _Reader:
    """Sees that a loop's rounds depend on a message, on its neighbours, and on what does not change in the loop."""

    def __init__(self, tree: nodes.Template, loop: nodes.For) -> None:
        if loop.recursive or loop.test or loop.else_ or not isinstance(loop.target, nodes.Name):
            raise ValueError("another kind of loop")
        self.messages = {"messages"} | ({loop.iter.name} if isinstance(loop.iter, nodes.Name) else set())
        self.needed = 1
        """So many messages are read wherever the loop is."""
        macros = [node for node in tree.body if isinstance(node, nodes.Macro)]
        self._macros = {macro.name for macro in macros}
        outside = [node for node in tree.body if node is not loop and node not in macros]
        assigned = [a for node in outside for a in (node, *node.find_all(nodes.Assign)) if isinstance(a, nodes.Assign)]
        self._outside = {name.name for node in assigned for name in _names(node.target)}
        spaces = [node for node in assigned if isinstance(node.node, nodes.Call) and node.node.node == _NAMESPACE]
        self._spaces = {name.name for node in spaces for name in _names(node.target)}
        self._read: dict[tuple[str, str], nodes.Expr] = {}
        for macro in macros:
            for node in (*macro.defaults, *macro.body):
                self._see(node, in_loop=False)
        for node in loop.body:
            self._see(node, in_loop=True)

    @property
    def read(self) -> list[nodes.Expr]:
        """What else rounds may read."""
        return [*self._read.values()]

    def _see(self, node: nodes.Node, *, in_loop: bool) -> None:
        """Look at a part of a round; `in_loop`: where `loop` is the loop over messages.

        Raises:
            ValueError: it may depend on more than that.
        """
        match node:
            case nodes.For():
                if node.recursive or any(name.name == "loop" for name in _names(node.test)):
                    raise ValueError("another kind of loop")
                for child in (node.target, node.iter, node.test, *node.else_):
                    if child is not None:
                        self._see(child, in_loop=in_loop)
                for child in node.body:
                    self._see(child, in_loop=False)
                return
            case nodes.Break() if in_loop:
                raise ValueError("the loop may end early")
            case nodes.Stmt() if not isinstance(node, _STATEMENTS):
                raise ValueError(f"a {type(node).__name__} in the loop")
            case nodes.NSRef(name=name) if name in self._outside or name in self.messages:
                raise ValueError(f"a round sets {name}")
            case nodes.Filter(name="random"):
                raise ValueError("not the same each time")
            case nodes.Name(name="loop"):
                if in_loop or node.ctx != "load":
                    raise ValueError("the loop itself")
            case nodes.Name(name=name) if name in self.messages | self._spaces or name in _UNSTEADY:
                raise ValueError(f"{name} as a whole")
            case nodes.Name(name=name) if name in self._macros:
                if node.ctx != "load":
                    raise ValueError(f"another {name}")
            case nodes.Name(name=name, ctx="load"):
                self._read[name, ""] = nodes.Name(name, "load")
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr) if in_loop:
                if attr not in _OF_A_ROUND:
                    raise ValueError(f"loop.{attr}")
                return
            case nodes.Getattr(node=nodes.Name(name=name), attr=attr) if name in self._spaces:
                self._read[name, attr] = nodes.Getattr(nodes.Name(name, "load"), attr, "load")
                return
            case nodes.Getitem(node=nodes.Name(name=name), arg=arg) if name in self.messages:
                self._see_place(arg, in_loop)
                return
        for child in node.iter_child_nodes():
            self._see(child, in_loop=in_loop)

    def _see_place(self, place: nodes.Expr, in_loop: bool) -> None:
        """Messages are named by their places: the first ones, or this one and its neighbours."""
        if isinstance(place, nodes.Const) and isinstance(place.value, int) and place.value >= 0:
            self.needed = max(self.needed, place.value + 1)
            return
        if isinstance(place, nodes.Add | nodes.Sub) and place.right == nodes.Const(1):
            place = place.left
        if not in_loop or place != nodes.Getattr(_LOOP, "index0", "load"):
            raise ValueError("messages anywhere")


class _Numbered(NodeTransformer):
    """Counts the rounds that are not run, in the loop over messages."""

    def __init__(self, messages: set[str]) -> None:
        self._messages = messages

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Another loop: its own rounds are all run."""
        node.iter = self.visit(node.iter)
        node.else_ = [self.visit(child) for child in node.else_]
        return node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:
        """A number of the loop's."""
        if node.node == _LOOP and node.attr in ("index", "index0"):
            return nodes.Add(node, nodes.Name(_START, "load"))
        if node.node == _LOOP and node.attr == "first":
            return nodes.And(node, nodes.Not(nodes.Name(_START, "load")))
        return self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """A message before this one."""
        if isinstance(node.node, nodes.Name) and node.node.name in self._messages and isinstance(node.arg, nodes.Sub):
            return _filtered(_AT, node.node, self.visit(node.arg))
        return self.generic_visit(node)


_NAMESPACE, _LOOP = nodes.Name("namespace", "load"), nodes.Name("loop", "load")


def _names(node: nodes.Node | None) -> list[nodes.Name]:
    """All names in an expression."""
    if node is None:
        return []
    return [node] if isinstance(node, nodes.Name) else [*node.find_all(nodes.Name)]


def _filtered(name: str, *arguments: Any) -> nodes.Filter:
    return nodes.Filter(nodes.Name(_RUN, "load"), name, [*arguments], [], None, None)


def _written(what: nodes.Expr) -> nodes.Output:
    return nodes.Output([what])
