"""Compare what the vLLM plugin rests on with the Python files of a vLLM wheel, of which it fetches those few alone.

    scripts/check_engine.py URL|FILE

Reported is a name that the plugin imports and the wheel does not define, a method of a backend that vLLM's class no
longer has (so that vLLM would never call it) or that has arguments there which ours does not take, and an attribute of
an argument that its class does not define. Nothing of vLLM is run.
"""

import ast
import io
import sys
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PLUGIN = Path(__file__).resolve().parents[1] / "src/packedkv/integrations/vllm"
LIKE = {"AttentionImpl": ("vllm.v1.attention.backends.flash_attn", "FlashAttentionImpl")}
"""Classes of vLLM with methods that are called, but not declared in the base of both."""
Read = Callable[[str], str | None]
"""Text of a file of the wheel, or None."""


class NoPartsError(OSError):
    """A server sends whole files only."""


class Remote(io.RawIOBase):
    """A file behind a URL, read by ranges."""

    def __init__(self, url: str) -> None:
        self.url, self.at = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
            self.size = int(answer.headers["content-length"])

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self.at

    def seek(self, to: int, whence: int = 0) -> int:
        """Move the position."""
        self.at = (0, self.at, self.size)[whence] + to
        return self.at

    def readinto(self, to: memoryview) -> int:  # type: ignore[override]
        """Fetch as much as fits."""
        count = min(len(to), self.size - self.at)
        if count <= 0:
            return 0
        asked = urllib.request.Request(self.url, headers={"range": f"bytes={self.at}-{self.at + count - 1}"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            if answer.status != 206:
                raise NoPartsError(self.url)
            to[:count] = answer.read()
        self.at += count
        return count


class Found(NamedTuple):
    """A definition, and the module in which it stands."""

    module: str
    node: ast.AST


class Engine:
    """Definitions of vLLM's modules; ``read`` gives their files."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.trees: dict[str, ast.Module | None] = {}
        self.held: dict[int, dict[str, Found]] = {}

    def tree(self, module: str) -> ast.Module | None:
        """Return the parsed file of a module; None: there is none."""
        if module not in self.trees:
            path = module.replace(".", "/")
            text = self.read(f"{path}/__init__.py") or self.read(f"{path}.py")
            self.trees[module] = None if text is None else ast.parse(text)
        return self.trees[module]

    def find(self, module: str, name: str) -> Found | None:
        """Return the definition of a module's name, through imports of vLLM's own modules."""
        tree = self.tree(module)
        if tree is None or "." in name:
            return None
        stars = []
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
                return Found(module, node)
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            if any(isinstance(to, ast.Name) and to.id == name for to in targets):
                return Found(module, node)
            if isinstance(node, ast.ImportFrom):
                source = self.source(module, node)
                for alias in node.names:
                    if alias.name == "*":
                        stars.append(source)
                    elif (alias.asname or alias.name) == name:
                        return self.find(source, alias.name) if source.startswith("vllm") else Found(module, node)
        if self.tree(f"{module}.{name}") is not None:
            return Found(f"{module}.{name}", tree)
        return next((found for star in stars if (found := self.find(star, name))), None)

    def source(self, module: str, node: ast.ImportFrom) -> str:
        """Return the module that an import names."""
        if not node.level:
            return node.module or ""
        package = self.read(module.replace(".", "/") + "/__init__.py") is not None
        parts = module.split(".")
        return ".".join([*parts[: len(parts) - node.level + package], *filter(None, [node.module])])

    def members(self, found: Found) -> dict[str, Found]:
        """Return what instances of a class have, its bases' included."""
        own: dict[str, Found] = {}
        if not isinstance(found.node, ast.ClassDef):
            return own
        if id(found.node) in self.held:
            return self.held[id(found.node)]
        for base in found.node.bases:
            named = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(named, ast.Name) and (parent := self.find(found.module, named.id)):
                own |= self.members(parent)
        for node in ast.walk(found.node):
            if isinstance(node, ast.FunctionDef):
                own[node.name] = Found(found.module, node)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, (ast.Name, ast.Attribute)):
                own[getattr(node.target, "id", getattr(node.target, "attr", ""))] = Found(found.module, node)
            elif isinstance(node, ast.Assign):
                for to in node.targets:
                    own.setdefault(getattr(to, "id", getattr(to, "attr", "")), Found(found.module, node))
        self.held[id(found.node)] = own
        return own

    def type_of(self, found: Found) -> Found | None:
        """Return the class of an annotated attribute, if it is one of vLLM's."""
        if not isinstance(found.node, ast.AnnAssign):
            return None
        names = [node.id for node in ast.walk(found.node.annotation) if isinstance(node, ast.Name)]
        named = [one for name in names if (one := self.find(found.module, name)) and isinstance(one.node, ast.ClassDef)]
        return named[0] if len(named) == 1 else None


def parameters(method: ast.FunctionDef) -> tuple[list[str], bool]:
    """Return names of a method's parameters, and whether it takes others."""
    given = method.args
    return [x.arg for x in (*given.posonlyargs, *given.args)], given.vararg is not None or given.kwarg is not None


def refused(ours: ast.FunctionDef, theirs: ast.FunctionDef) -> str:
    """Return the argument that vLLM's method has and ours does not take, or ''."""
    (own, more), (asked, _) = parameters(ours), parameters(theirs)
    asked += [x.arg for x in theirs.args.kwonlyargs]
    own += [x.arg for x in ours.args.kwonlyargs]
    return "" if more else next((name for name in asked if name not in own), "")


def missing_names(engine: Engine, text: str, file: str) -> Iterator[str]:
    """Names of vLLM that a file of the plugin uses and that this vLLM does not have."""
    tree = ast.parse(text)
    imported: dict[str, Found] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "vllm":
            continue
        for alias in node.names:
            found = engine.find(node.module or "", alias.name)
            if found is None:
                yield f"{file}: {node.module}.{alias.name} is not defined"
            else:
                imported[alias.asname or alias.name] = found
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            theirs: dict[str, Found] = {}
            for base in bases:
                if isinstance(base, ast.Name) and base.id in imported:
                    if base.id in LIKE and (like := engine.find(*LIKE[base.id])):
                        theirs |= engine.members(like)
                    theirs |= engine.members(imported[base.id])
            # an argument of the constructor that becomes an attribute of the same name
            methods = [member for member in node.body if isinstance(member, ast.FunctionDef)]
            for given in next((method.args.args for method in methods if method.name == "__init__"), []):
                if isinstance(given.annotation, ast.Name) and given.annotation.id in imported:
                    for method in methods:
                        yield from _attributes(engine, method, f"self.{given.arg}", imported[given.annotation.id], file)
            for ours in node.body if theirs else []:
                if not isinstance(ours, ast.FunctionDef) or ours.name.startswith("_"):
                    continue
                public = theirs.get(ours.name)
                if public is None:
                    yield f"{file}: {node.name}.{ours.name}: vLLM's class has no such method"
                elif public and isinstance(public.node, ast.FunctionDef) and (name := refused(ours, public.node)):
                    yield f"{file}: {node.name}.{ours.name} does not take {name!r}"
        elif isinstance(node, ast.FunctionDef):
            for given in (*node.args.args, *node.args.kwonlyargs):
                kind = given.annotation
                if isinstance(kind, ast.Name) and kind.id in imported:
                    yield from _attributes(engine, node, given.arg, imported[kind.id], file)


def _attributes(engine: Engine, where: ast.FunctionDef, name: str, kind: Found, file: str) -> Iterator[str]:
    """Attributes of an argument, or of ``self.NAME``, and of their attributes, that are not there."""
    base, *inner = name.split(".")
    for node in ast.walk(where):
        chain, at = [], node
        while isinstance(at, ast.Attribute):
            chain.append(at.attr)
            at = at.value
        if not isinstance(at, ast.Name) or at.id != base or chain[len(chain) - len(inner) :] != inner:
            continue
        del chain[len(chain) - len(inner) :]
        found: Found | None = kind
        for i, attribute in enumerate(reversed(chain), 1):
            if found is None or not (members := engine.members(found)):
                break
            if attribute not in members:
                yield f"{file}: {name}.{'.'.join(chain[: -i - 1 : -1])} is not defined"
                break
            found = engine.type_of(members[attribute])


def main(wheel: str) -> int:
    """Print the missing names, and return their number."""
    source = io.BufferedReader(Remote(wheel), 1 << 18) if wheel.startswith("http") else wheel.removeprefix("file://")
    with zipfile.ZipFile(source) as files:
        names = set(files.namelist())
        engine = Engine(cache(lambda path: files.read(path).decode() if path in names else None))
        sources = sorted(PLUGIN.glob("*.py"))
        missing = sorted({line for file in sources for line in missing_names(engine, file.read_text(), file.name)})
    print(*missing, sep="\n", end="\n" * bool(missing))
    print(f"== {wheel.rsplit('/')[-1]}: {len(engine.trees)} modules read, {len(missing)} names are not there")
    return len(missing)


if __name__ == "__main__":
    try:
        sys.exit(bool(main(sys.argv[1])))
    except NoPartsError as error:
        print(f"== not compared with vLLM's files: {error} is sent as a whole only", file=sys.stderr)
