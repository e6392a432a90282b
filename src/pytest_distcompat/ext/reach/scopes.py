"""The functions of a Python module: where they are, whether they are public, their conditions.

``analysis`` asks, for each branch of a file, in which function it is (``Scopes.at``), and how
likely users run into it (``Scope.rank``): a branch in a public function whose condition reads an
argument or a setting comes first. All is read from the syntax tree; nothing is imported.

Reach is the part of this project that records which branches of the installed libraries
(accelerate, transformers, ...) tests execute. ``analysis`` is its module that lists the branches of
a file.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from pytest_distcompat.ext.reach.branches import Function, Rank, bits_of
from pytest_distcompat.ext.reach.libraries import FileId

#: A name that matches this, in a condition, counts as a setting: ``self.fsdp_config``.
_SETTING = re.compile(
    r"config|args|plugin|handler|setting|option|policy|environ|getenv|kwargs", re.IGNORECASE
)


@dataclass(frozen=True)
class Scope:
    """A function of a module, with what is needed to rank its branches."""

    #: The qualified name: ``Accelerator.prepare``.
    name: str
    #: The last line of its definition, after which the body begins, and the last line of the body.
    first: int
    last: int
    #: Whether users may call it.
    public: bool
    #: The names of its parameters, without ``self``.
    arguments: frozenset[str]

    def rank(self, condition: ast.expr | None) -> Rank:
        """Return how likely users run into a branch with that condition; None: it has none."""
        reads_input = condition is not None and self._reads_input(condition)
        if self.public and reads_input:
            return Rank.PUBLIC_SETTING
        if self.public:
            return Rank.PUBLIC
        if reads_input:
            return Rank.SETTING
        return Rank.INTERNAL

    def _reads_input(self, condition: ast.expr) -> bool:
        """Tell whether a condition reads an argument of the function, or a setting."""
        for node in ast.walk(condition):
            if isinstance(node, ast.Name):
                if node.id in self.arguments or _SETTING.search(node.id):
                    return True
            elif isinstance(node, ast.Attribute) and _SETTING.search(node.attr):
                return True
        return False


#: The definition of a function in a syntax tree.
_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class Scopes:
    """The functions of a module, and the conditions of its branches by line.

    Args:
        module: The syntax tree of the module.
        file_id: The file. Its path says whether the module is private: ``torch/_ops.py``.
    """

    def __init__(self, module: ast.Module, file_id: FileId) -> None:
        self._exported = _exported_names(module)
        module_path = PurePosixPath(file_id.path).with_suffix("")
        self._in_private_module = any(_is_private(part) for part in module_path.parts)
        self._scopes: list[Scope] = []
        #: Line -> the innermost function that has it in its body.
        self._innermost: dict[int, Scope] = {}
        #: Line -> what the statement there reads to choose a branch: the test of an ``if``.
        self.conditions: dict[int, ast.expr] = {}
        self._read(module, ())
        self.functions = tuple(self._function(scope) for scope in self._scopes)

    def at(self, line: int) -> Scope | None:
        """Return the innermost function around a line; None for a line that runs on import."""
        return self._innermost.get(line)

    def _read(self, node: ast.AST, names: tuple[str, ...]) -> None:
        """Read the functions and conditions below a node of the syntax tree.

        Args:
            node: The node.
            names: The names of the functions and classes that it is in, the outermost first.
        """
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                # Half of all nodes are expressions, and no statement is below one.
                continue
            self._read_condition(child)
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inner_names = (*names, child.name)
                self._enter(child, inner_names)
                self._read(child, inner_names)
            elif isinstance(child, ast.ClassDef):
                self._read(child, (*names, child.name))
            else:
                self._read(child, names)

    def _read_condition(self, node: ast.AST) -> None:
        """Note what a statement reads to choose a branch, if it is one that does."""
        if isinstance(node, (ast.If, ast.While)):
            self.conditions[node.lineno] = node.test
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self.conditions[node.lineno] = node.iter
        elif isinstance(node, ast.Match):
            # Each ``case`` is a line with branches of its own.
            for case in node.cases:
                self.conditions[case.pattern.lineno] = node.subject

    def _enter(self, node: _FunctionNode, names: tuple[str, ...]) -> None:
        """Add a function.

        Args:
            node: Its definition.
            names: The names of the functions and classes around it, and its own.
        """
        # The definition itself is no part of the body: Python runs it when the module is imported.
        # A signature may take several lines. The body of ``def f(): ...`` is on the line of its
        # definition, so such a function has no lines of its own.
        first = node.body[0].lineno - 1
        last = node.end_lineno or node.lineno
        scope = Scope(
            name=".".join(names),
            first=first,
            last=last,
            public=self._is_public(names),
            arguments=_argument_names(node.args),
        )
        self._scopes.append(scope)
        for line in range(first + 1, last + 1):
            # Functions inside it are entered later, and take their lines from it.
            self._innermost[line] = scope

    def _is_public(self, names: tuple[str, ...]) -> bool:
        """Tell whether users may call a function.

        The module's ``__all__`` says so; without it the names of the function and of the module do.
        """
        if any(_is_private(name) for name in names):
            return False
        if self._exported is not None:
            return names[0] in self._exported
        return not self._in_private_module

    def _function(self, scope: Scope) -> Function:
        """Return the function with the lines that no function inside it has.

        ``bits_of`` makes one integer of them: the lines 1 and 3 are ``0b1010``.
        """
        own_lines: list[int] = []
        for line in range(scope.first + 1, scope.last + 1):
            if self._innermost[line] is scope:
                own_lines.append(line)
        return Function(scope.name, scope.first, bits_of(own_lines), scope.public)


def _argument_names(arguments: ast.arguments) -> frozenset[str]:
    """Return the names of a function's parameters, without ``self`` and ``cls``."""
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    if arguments.vararg is not None:
        parameters.append(arguments.vararg)
    if arguments.kwarg is not None:
        parameters.append(arguments.kwarg)
    names = {parameter.arg for parameter in parameters}
    return frozenset(names - {"self", "cls"})


def _exported_names(module: ast.Module) -> frozenset[str] | None:
    """Return the names in a module's ``__all__``; None if it has none that can be read."""
    for node in module.body:
        if not isinstance(node, ast.Assign):
            continue
        names = [ast.unparse(target) for target in node.targets]
        if names == ["__all__"]:
            try:
                return frozenset(ast.literal_eval(node.value))
            except (ValueError, TypeError):
                return None
    return None


def _is_private(name: str) -> bool:
    """Tell whether a name begins with an underscore, unless it is one such as ``__init__``."""
    is_dunder = name.startswith("__") and name.endswith("__")
    return name.startswith("_") and not is_dunder
