"""Check, in a model's source code, that it hands cached K and V to transformers' attention interface unchanged.

``streamed`` and ``fused`` attention give the model a handle, which can only be passed on.
"""

import ast
import inspect
import threading
from functools import cache
from typing import Any

from packedkv.errors import UnsupportedError

INTERFACES = "ALL_ATTENTION_FUNCTIONS"
"""Name of the registry of attention functions in transformers' modules."""
ATTEMPTS = 100
_parsing = threading.Lock()


def check_use_of_cached(model: Any) -> None:
    """Raise UnsupportedError, with the first expression, if a model uses cached K and V other than to pass them on."""
    for kind in _kinds(model):
        if used := _use_in(kind):
            raise UnsupportedError(f"{kind.__name__} uses `{used}` of cached keys or values")


def adds_position_bias(model: Any) -> bool:
    """Whether a decoder's attention adds a position bias to the scores (T5)."""
    return any("position_bias=" in _source_of(kind) for kind in _kinds(model))


def _kinds(model: Any) -> dict[Any, None]:
    """Classes of the decoder's modules."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return dict.fromkeys(type(module) for module in (decoder or model).modules())


@cache
def _source_of(kind: Any) -> str:
    """Source of the forward of a class that uses a cache; empty for another, or without source."""
    try:
        source = inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):  # no source: nothing is known, and the handle itself raises
        return ""
    return source if ".update(" in source or ".layers[" in source else ""


@cache
def _use_in(kind: Any) -> str:
    if not (source := _source_of(kind)):
        return ""
    tree = _parsed("class _:\n" + source if source[0].isspace() else source)
    forward = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return _Reader().block(forward.body)


def _parsed(source: str) -> ast.Module:
    """Parse source code; CPython 3.11 raises SystemError while another thread parses (python/cpython#106905)."""
    with _parsing:  # excludes threads of this module; a new attempt those of other libraries
        for _ in range(ATTEMPTS - 1):
            try:
                return ast.parse(source)
            except SystemError:
                continue
        return ast.parse(source)


class _Reader:
    """Follows the names of cached tensors through the statements of one function."""

    def __init__(self) -> None:
        self.cached = set[str]()  # names of what a cache returned
        self.interfaces = set[str]()  # names of attention functions of transformers' registry
        self.handed = False  # whether cached tensors were passed to such a function

    def block(self, statements: list[ast.stmt]) -> str:
        """Return the first expression that uses a cached tensor other than to pass it to an attention function."""
        return next(filter(None, map(self._statement, statements)), "")

    def _statement(self, statement: ast.stmt) -> str:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            return self._assign(statement.targets[0], statement.value)
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            return self._assign(statement.target, statement.value)
        if isinstance(statement, ast.If):
            return self._use(statement.test) or self._branches(statement.body, statement.orelse)
        inner = [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.stmt)]
        outer = [node for node in ast.iter_child_nodes(statement) if not isinstance(node, ast.stmt)]
        return next(filter(None, map(self._use, outer)), "") or self.block(inner)

    def _branches(self, *branches: list[ast.stmt]) -> str:
        """Read both branches of an ``if``; where one hands over what is cached, the other is an option (GPT-2)."""
        before, after, reasons = self.cached, set[str](), []
        handed, self.handed = self.handed, False
        for branch in branches:
            self.cached = set(before)
            reasons.append(self.block(branch))
            after |= self.cached
        self.cached = after
        option, self.handed = self.handed, self.handed or handed
        return "" if option else next(filter(None, reasons), "")

    def _assign(self, target: ast.expr, value: ast.expr) -> str:
        if _has(value, {INTERFACES}) and not _has(value, self.cached):
            self.interfaces |= _stored(target)
            return ""
        pair = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        pairs = list(zip(target.elts, value.elts, strict=False)) if pair else [(target, value)]  # type: ignore[attr-defined]
        for part in value.elts if isinstance(value, ast.Tuple) else [value]:  # another name is no use
            if not isinstance(part, ast.Name) and (found := self._use(part)):
                return found
        before = self.cached
        for name, part in pairs:
            held = _is_named(part, before) or _is_layers(part) or (_is_update(part) and isinstance(name, ast.Tuple))
            self.cached = self.cached | _stored(name) if held else self.cached - _stored(name)
        return ""

    def _use(self, node: ast.AST) -> str:
        for parent in ast.walk(node):
            for child in ast.iter_child_nodes(parent):
                child = child.value if isinstance(child, ast.keyword) else child
                if not _is_named(child, self.cached):
                    continue
                if isinstance(parent, ast.Call) and _has(parent.func, self.interfaces | {INTERFACES}):
                    self.handed = True
                elif not _is_update(parent) and not isinstance(parent, ast.Compare | ast.keyword):
                    return ast.unparse(parent)
        return ""


def _stored(target: ast.expr) -> set[str]:
    """Names that an assignment sets."""
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _has(expression: ast.AST, names: set[str]) -> bool:
    return any(_is_named(node, names) for node in ast.walk(expression))


def _is_named(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _is_update(value: ast.AST) -> bool:
    """Whether an expression is ``cache.update(keys, values, layer, ...)``."""
    called = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "update"
    return called and len(value.args) + len(value.keywords) >= 3  # type: ignore[attr-defined]


def _is_layers(value: ast.AST) -> bool:
    """Whether an expression is ``cache.layers[i].keys`` or ``.values``."""
    if not isinstance(value, ast.Attribute) or value.attr not in ("keys", "values"):
        return False
    layers = value.value.value if isinstance(value.value, ast.Subscript) else None
    return isinstance(layers, ast.Attribute) and layers.attr == "layers"
