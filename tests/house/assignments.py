"""Assignments to an attribute of an object from outside of the module of its class: `job.left = 3`.

Nobody finds such a writer from the class. The type of the object is read from annotations, constructors and declared
results; where that does not tell, the attribute counts if one module alone has a class that declares it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.house.figures import PACKAGE, SourceModule, nodes_of

_ITEMS_OF = {"list", "set", "tuple", "deque", "Iterable", "Iterator", "Sequence", "Collection", "frozenset"}
_VALUES_OF = {"dict", "defaultdict", "Mapping", "MutableMapping"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class _Class:
    module: str
    bases: list[ast.expr]
    attributes: dict[str, ast.expr | None] = field(default_factory=dict)
    """The annotation, or the value it is first given; None where neither is known."""
    results: dict[str, ast.expr] = field(default_factory=dict)
    """The annotated result of each method."""


class _Index:
    """The classes of all modules, and what each name means in each module."""

    def __init__(self, found: list[SourceModule]) -> None:
        self.classes: dict[tuple[str, str], _Class] = {}
        self.imports: dict[str, dict[str, tuple[str, str]]] = {}
        self.results: dict[tuple[str, str], ast.expr] = {}
        self.libraries: dict[str, set[str]] = {}
        for module in found:
            self.libraries[module.name] = {
                alias.asname or alias.name.partition(".")[0]
                for node in module.nodes
                if isinstance(node, ast.Import)
                for alias in node.names
            }
            self.imports[module.name] = {
                alias.asname or alias.name: (node.module or "", alias.name)
                for node in module.nodes
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef):
                    self.classes[module.name, node.name] = _class(module.name, node)
                elif isinstance(node, _Function) and node.returns is not None:
                    self.results[module.name, node.name] = node.returns
        self.declaring: dict[str, set[str]] = defaultdict(set)
        for (module_name, _), each in self.classes.items():
            for attribute in each.attributes:
                self.declaring[attribute].add(module_name)

    def named(self, module: str, name: str) -> tuple[str, str]:
        """Where a name of a module was defined: its module and its name there."""
        where = self.imports.get(module, {}).get(name, (module, name))
        again = self.imports.get(where[0], {}).get(where[1])  # passed on by a package's __init__
        return again if again and where not in self.classes else where

    def is_foreign(self, module: str, name: str) -> bool:
        """Whether a name is imported from another library."""
        where = self.imports[module].get(name)
        return name in self.libraries[module] or (where is not None and where[0].partition(".")[0] != PACKAGE)

    def class_with(self, of: _Class | None, attribute: str) -> _Class | None:
        """The class among `of` and its bases that declares the attribute."""
        if of is None or attribute in of.attributes:
            return of
        for base in of.bases:
            if found := self.class_with(self.annotated(of.module, base), attribute):
                return found
        return None

    def annotated(self, module: str, annotation: ast.expr | None) -> _Class | None:
        """The class that an annotation names."""
        match annotation:
            case ast.Name(name):
                return self.classes.get(self.named(module, name))
            case ast.Constant(str(text)):
                return self.annotated(module, ast.parse(text, mode="eval").body)
            case ast.BinOp(left, ast.BitOr(), right):
                return self.annotated(module, left) or self.annotated(module, right)
        return None

    def item(self, module: str, annotation: ast.expr | None) -> _Class | None:
        """The class of the items of an annotated collection, of the values of a mapping."""
        match annotation:
            case ast.Subscript(ast.Name(name), ast.Tuple([first, *others])):
                return self.annotated(module, others[0] if name in _VALUES_OF and others else first)
            case ast.Subscript(ast.Name(name), item) if name in _ITEMS_OF:
                return self.annotated(module, item)
        return None


class _Scope:
    """What the names of one function mean."""

    def __init__(self, index: _Index, module: str, owner: _Class | None, function: _Function) -> None:
        self._index = index
        self._module = module
        self._names: dict[str, _Class | None] = {}
        self._foreign: set[str] = set()  # names of objects of other libraries' classes
        arguments = function.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            self._names[each.arg] = index.annotated(module, each.annotation)
            self._note_foreign(each.arg, each.annotation)
        if owner is not None and arguments.args and arguments.args[0].annotation is None:
            self._names[arguments.args[0].arg] = owner
        for node in nodes_of(function):
            match node:
                case ast.arg(name, annotation) if annotation is not None:  # of a nested function
                    self._names[name] = index.annotated(module, annotation)
                case ast.AnnAssign(ast.Name(name), annotation):
                    self._names[name] = index.annotated(module, annotation)
                case ast.Assign([ast.Name(name)], value) | ast.NamedExpr(ast.Name(name), value):
                    self._names.setdefault(name, self.of(value))
                    self._note_foreign(name, value.func if isinstance(value, ast.Call) else None)
                case ast.For(ast.Name(name), iterable) | ast.AsyncFor(ast.Name(name), iterable):
                    self._names.setdefault(name, self.item_of(iterable))

    def is_foreign(self, value: ast.expr) -> bool:
        """Whether an expression begins at an object of another library."""
        while isinstance(value, ast.Attribute):
            value = value.value
        return isinstance(value, ast.Name) and value.id in self._foreign

    def _note_foreign(self, name: str, what: ast.expr | None) -> None:
        while isinstance(what, ast.Attribute):  # module.Class
            what = what.value
        if isinstance(what, ast.Name) and self._index.is_foreign(self._module, what.id):
            self._foreign.add(name)

    def of(self, value: ast.expr | None) -> _Class | None:
        """The class of an expression; None if it is of no class of ours, or not known."""
        match value:
            case ast.Name(name):
                return self._names.get(name)
            case ast.Attribute(of, name):
                owner = self._index.class_with(self.of(of), name)
                return self._declared(owner, name) if owner else None
            case ast.Subscript(of, _):
                return self.item_of(of)
            case ast.Await(inner):
                return self.of(inner)
            case ast.Call(ast.Name(name)):
                where = self._index.named(self._module, name)
                return self._index.classes.get(where) or self._index.annotated(where[0], self._index.results.get(where))
            case ast.Call(ast.Attribute(of, name)):
                owner = self.of(of)
                return self._index.annotated(owner.module, owner.results.get(name)) if owner else None
            case ast.BoolOp(_, values):
                return next((found for each in values if (found := self.of(each))), None)
        return None

    def item_of(self, value: ast.expr) -> _Class | None:
        """The class of what a collection has."""
        match value:
            case ast.Attribute(of, name):
                owner = self._index.class_with(self.of(of), name)
                return self._index.item(owner.module, owner.attributes.get(name)) if owner else None
            case ast.Call(ast.Attribute(of, name), []) if (owner := self.of(of)) is not None and name in owner.results:
                return self._index.item(owner.module, owner.results[name])
            case ast.Call(ast.Attribute(of, "values" | "copy")) | ast.Call(ast.Name("tuple" | "list"), [of]):
                return self.item_of(of)
        return None

    def _declared(self, owner: _Class, name: str) -> _Class | None:
        declared = owner.attributes.get(name)
        found = self._index.annotated(owner.module, declared)
        if found is None and isinstance(declared, ast.Call) and isinstance(declared.func, ast.Name):
            found = self._index.classes.get(self._index.named(owner.module, declared.func.id))
        return found


def assignments_from_outside(found: list[SourceModule]) -> list[str]:
    """Each such assignment: `MODULE:LINE: TARGET`."""
    index = _Index(found)
    outside: list[str] = []
    for module in found:
        for owner, function in _functions(index, module):
            if targets := _targets(function):
                scope = _Scope(index, module.name, owner, function)
                outside += [
                    f"{module.name}:{target.lineno}: {ast.unparse(target)}"
                    for target in targets
                    if _is_outside(index, module.name, scope, target)
                ]
    return outside


def _is_outside(index: _Index, module: str, scope: _Scope, target: ast.Attribute) -> bool:
    of = scope.of(target.value)
    if of is not None:
        declaring = index.class_with(of, target.attr)
        return declaring is not None and declaring.module != module
    if scope.is_foreign(target.value):
        return False
    declaring_modules = index.declaring.get(target.attr, set())
    return len(declaring_modules) == 1 and module not in declaring_modules


def _functions(index: _Index, module: SourceModule) -> Iterator[tuple[_Class | None, _Function]]:
    for node in module.tree.body:
        if isinstance(node, _Function):
            yield None, node
        elif isinstance(node, ast.ClassDef):
            owner = index.classes[module.name, node.name]
            yield from ((owner, each) for each in node.body if isinstance(each, _Function))


def _targets(function: _Function) -> list[ast.Attribute]:
    """The attributes that a function assigns to, but for those of `self` and `cls`."""
    return [
        node
        for node in nodes_of(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def _class(module: str, node: ast.ClassDef) -> _Class:
    made = _Class(module, node.bases)
    for each in node.body:
        match each:
            case ast.AnnAssign(ast.Name(name), annotation):
                made.attributes[name] = annotation
            case ast.Assign([ast.Name(name)], value):
                made.attributes[name] = value
            case ast.FunctionDef(name=name, returns=returns) | ast.AsyncFunctionDef(name=name, returns=returns):
                if returns is not None:
                    made.results[name] = returns
                decorators = {ast.unparse(decorator) for decorator in each.decorator_list}
                if decorators & {"property", "cached_property"}:
                    made.attributes[name] = returns
                _note_own(made, each)
    return made


def _note_own(made: _Class, method: _Function) -> None:
    """The attributes that a method gives `self`, with the annotation of a parameter that is one's value."""
    parameters = {each.arg: each.annotation for each in (*method.args.args, *method.args.kwonlyargs)}
    for node in nodes_of(method):
        match node:
            case ast.AnnAssign(ast.Attribute(ast.Name("self"), name), annotation):
                made.attributes[name] = annotation
            case ast.Assign(targets, value):
                known = parameters.get(value.id) if isinstance(value, ast.Name) else value
                for target in targets:
                    for each in ast.walk(target):
                        match each:
                            case ast.Attribute(ast.Name("self"), name, ast.Store()):
                                made.attributes.setdefault(name, known if each is target else None)
