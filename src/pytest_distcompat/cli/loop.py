"""Plain training loop of a module, read with ast, and the driver that ``init`` scaffolds around it.

Each method gets statements of the loop, and those that define what they use. What cannot be read raises an error that
asks for it.
"""

from __future__ import annotations

import ast
import builtins
import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

#: What wraps a model, to its strategy.
_WRAPPERS = {
    "DistributedDataParallel": "ddp",
    "DDP": "ddp",
    "FullyShardedDataParallel": "fsdp1",
    "FSDP": "fsdp1",
    "fully_shard": "fsdp2",
}
#: What a rank knows, by the names that loops have for it.
_RANK = {
    "device": "self.world.device",
    "rank": "self.world.rank",
    "local_rank": "self.world.local_rank",
    "world_size": "self.world.size",
}
#: Statements of a loop that do not train.
_REPORTING = re.compile(r"\b(print|wandb|writer|logger|logging|pbar|progress\w*|torch\.save|save_\w+)\b")
#: Rows of a batch where the loop does not say how many.
_ROWS = 4
_SCAFFOLD = '''"""Training loop of {module}, as a driver. `distcompat init` filled in what it read: check it, and each TODO."""

from pytest_distcompat import Driver


class LoopDriver(Driver):
    name = "{module}"
    libraries = ("torch",)
{claims}
'''


@dataclass(frozen=True)
class Scaffold:
    """Source of a driver around a loop, and the cells that the loop trains."""

    source: str
    strategies: tuple[str, ...]
    precision: str


def scaffold(tree: ast.Module, module: str) -> Scaffold | None:
    """Return the driver around the training loop of a module with that import name, None if it has no loop."""
    return _Reader(tree, module).scaffold()


def _walk(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    return (one for node in nodes for one in ast.walk(node))


def _calls(nodes: Iterable[ast.AST], *names: str) -> list[ast.Call]:
    """Return the calls of functions or methods with one of these names."""
    return [one for one in _walk(nodes) if isinstance(one, ast.Call) and _last(one.func) in names]


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _names(nodes: Iterable[ast.AST], context: type[ast.expr_context]) -> set[str]:
    """Return the names that are read (``ast.Load``) or assigned (``ast.Store``); ``x += 1`` does both."""
    found = [one for node in nodes for one in ast.walk(node)]
    names = {one.id for one in found if isinstance(one, ast.Name) and isinstance(one.ctx, context)}
    return names | {_last(one.target) for one in found if isinstance(one, ast.AugAssign)} - {""}


def _defines(node: ast.AST, names: Collection[str]) -> bool:
    return isinstance(node, (ast.Assign, ast.AnnAssign)) and not _names([node], ast.Store).isdisjoint(names)


def _parsed(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


def _plain(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements without autocast around them."""
    for one in body:
        if isinstance(one, ast.With) and "autocast" in ast.unparse(one.items[0]):
            yield from _plain(one.body)
        else:
            yield one


def _preceding(body: Iterable[ast.stmt], node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements before a node, those in the blocks around it too."""
    for one in body:
        if one is node:
            return
        if any(part is node for part in ast.walk(one)):
            yield from _preceding(getattr(one, "body", ()), node)
            return
        # Of a condition whether to wrap, the branch that wraps.
        yield from one.body if isinstance(one, ast.If) and _calls(one.body, *_WRAPPERS) else [one]


class _Rename(ast.NodeTransformer):
    """Replaces names, arguments of the command line by their defaults, and GPUs by the rank's device."""

    def __init__(self, names: Mapping[str, str], defaults: Mapping[str, Any]) -> None:
        self.names, self.defaults = names, defaults

    def visit_Name(self, node: ast.Name) -> ast.AST:
        new = self.names.get(node.id, node.id)
        return ast.Name(new, node.ctx) if new.isidentifier() else ast.parse(new, mode="eval").body

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if _last(node.value) == "args" and node.attr in self.defaults:
            return ast.Constant(self.defaults[node.attr])
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            node.func.attr, node.args = "to", [ast.parse(_RANK["device"], mode="eval").body]
        # A wrapper may take the device from its model, which may be on the CPU.
        node.keywords = [one for one in node.keywords if one.arg not in {"device_ids", "output_device"}]
        return self.generic_visit(node)


class _Reader:
    """Reads one module."""

    def __init__(self, tree: ast.Module, module: str) -> None:
        self.tree, self.module = tree, module
        self.functions = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
        self.imports = dict(self._imports())
        self.defaults = dict(self._defaults())
        self.trains_at_import = False

    def _defaults(self) -> Iterator[tuple[str, Any]]:
        for call in _calls([self.tree], "add_argument"):
            flags = [one.value for one in call.args if isinstance(one, ast.Constant)]
            for one in call.keywords:
                if flags and one.arg == "default" and isinstance(one.value, ast.Constant):
                    yield str(flags[-1]).lstrip("-").replace("-", "_"), one.value.value

    def _imports(self) -> Iterator[tuple[str, str]]:
        """Yield each global name of the module with the statement that imports it."""
        for one in self.tree.body:
            if isinstance(one, ast.Import):
                for alias in one.names:
                    yield (alias.asname or alias.name).partition(".")[0], ast.unparse(ast.Import([alias]))
            elif isinstance(one, ast.ImportFrom):
                package = self.module.split(".")[: -one.level] if one.level else []
                source = ".".join([*package, *([one.module] if one.module else [])])
                for alias in one.names if source else ():
                    yield alias.asname or alias.name, ast.unparse(ast.ImportFrom(source, [alias], 0))
            elif isinstance(one, (ast.FunctionDef, ast.ClassDef)):
                yield one.name, f"from {self.module} import {one.name}"
            elif isinstance(one, ast.Assign):
                yield from ((name, f"from {self.module} import {name}") for name in _names(one.targets, ast.Store))

    def scaffold(self) -> Scaffold | None:
        """Return the driver around the first function, or else the top level, that trains in a loop."""
        scopes: list[ast.FunctionDef | ast.Module] = [*self.functions.values(), self.tree]
        for scope in scopes:
            body = [one for one in scope.body if not isinstance(one, (ast.FunctionDef, ast.ClassDef))]
            loops = [one for one in _walk(body) if isinstance(one, ast.For) and _calls(one.body, "backward")]
            if loops:
                self.trains_at_import = scope is self.tree and not any("__name__" in ast.unparse(one) for one in body)
                setup = list(self._before(scope, loops[-1]))
                # A parameter of a function is what its caller calls it.
                aliases = {
                    one.targets[0].id: one.value.id
                    for one in setup
                    if isinstance(one, ast.Assign)
                    and isinstance(one.targets[0], ast.Name)
                    and isinstance(one.value, ast.Name)
                }
                rename = _Rename(aliases, {})
                statements = [rename.visit(one) for one in setup if not _defines(one, aliases)]
                return self._around(rename.visit(loops[-1]), statements)
        return None

    def _before(self, scope: ast.FunctionDef | ast.Module, node: ast.AST) -> Iterator[ast.stmt]:
        """Yield the statements that run before a node of a function: those of its caller, its arguments, its own."""
        if isinstance(scope, ast.FunctionDef):
            parameters = [one.arg for one in (*scope.args.posonlyargs, *scope.args.args)]
            values = dict(zip(reversed(parameters), reversed(scope.args.defaults), strict=False))
            callers: list[ast.FunctionDef | ast.Module] = [*self.functions.values(), self.tree]
            for caller in callers:
                body = [one for one in caller.body if not isinstance(one, (ast.FunctionDef, ast.ClassDef))]
                call = next(iter(_calls(body, scope.name)), None)
                if call is not None and caller is not scope:
                    yield from self._before(caller, call)
                    values |= dict(zip(parameters, call.args, strict=False))
                    values |= {one.arg: one.value for one in call.keywords if one.arg}
                    break
            for name, value in values.items():
                if ast.unparse(value) != name:
                    yield from _parsed(f"{name} = {ast.unparse(value)}")
        yield from _preceding(scope.body, node)

    def _around(self, loop: ast.For, setup: list[ast.stmt]) -> Scaffold:
        training = [
            one for one in loop.body if _calls([one], "backward", "step") or not _REPORTING.search(ast.unparse(one))
        ]
        model, optimizer, scheduler = self._roles(setup, training)
        made = [one for one in setup if _defines(one, [model])]
        first = [_unwrapped(one) for one in made[:1]]
        wrapping = [
            one for one in setup if one in made[1:] or (isinstance(one, ast.Expr) and _calls([one], "fully_shard"))
        ]
        strategies = tuple(dict.fromkeys(_WRAPPERS[_last(one.func)] for one in _calls(setup, *_WRAPPERS)))
        if not _calls(wrapping, *_WRAPPERS):
            wrapping += _parsed(f"{model} = torch.nn.parallel.DistributedDataParallel({model})")
        start = (
            "if not torch.distributed.is_initialized():\n    torch.distributed.init_process_group(self.world.backend)\n"
            f"{model} = {model}.to(device)"
        )
        roles = {
            model: "self.model",
            optimizer: "self.optimizer",
            **({scheduler: "self.scheduler"} if scheduler else {}),
        }
        others = [one for one in self._needed(training, setup, roles) if not _defines(one, roles)]
        kept = sorted({name for one in others for name in _names([one], ast.Store)} & _names(training, ast.Load))
        end = ["self.model = model", "self.optimizer = self.make_optimizer(model)"]
        end += ["self.scheduler = self.make_scheduler(self.optimizer)"] if scheduler else []
        end += [f"self.{name} = {name}" for name in kept]
        flat = list(_plain(training))
        backward = next(n for n, one in enumerate(flat) if _calls([one], "backward"))
        measured = [one for one in flat[:backward] if not _calls([one], "zero_grad")]
        (call,) = _calls([flat[backward]], "backward")[:1]
        read = [_last(one) for one in ast.walk(call) if isinstance(one, ast.Name)]
        loss = next((name for name in read if name in _names(training, ast.Store)), "loss")
        as_model = {model: "model"}

        def made_by(head: str, name: str, given: Mapping[str, str]) -> str:
            last = [one for one in setup if _defines(one, [name])][-1:]
            return self._method(head, [*self._needed(last, setup, given), *last, *_parsed(f"return {name}")], given)

        before = self._needed(first, setup, [model])
        body = [*_parsed("torch.manual_seed(0)"), *before, *first, *_parsed(f"return {model}")]
        methods = [self._method("build_model(self)", body)]
        body = [*_parsed(start), *self._needed(wrapping, setup, [model]), *wrapping, *others, *_parsed("\n".join(end))]
        methods.append(self._method("build(self, model)", body, as_model))
        methods.append(made_by("make_optimizer(self, model)", optimizer, as_model))
        if scheduler:
            methods.append(made_by("make_scheduler(self, optimizer)", scheduler, {optimizer: "optimizer"}))
        methods.append(self._batch(loop, setup))
        step = [_once(loop, training, "self.world.rank"), *_parsed(f"return float({loss}.detach())")]
        methods.append(self._method("step(self, number)", step, {**roles, **{name: f"self.{name}" for name in kept}}))
        if measured:
            body = [*self._needed(measured, setup, [model]), _once(loop, measured, "rank"), *_parsed(f"return {loss}")]
            methods.append(self._method("loss(self, model, number, rank)", body, as_model))
        # What is saved has the names of the module's own model, which this driver alone wraps.
        methods += self._checkpoint(roles if strategies else {**roles, model: "self.model.module"})
        text = "\n".join(map(ast.unparse, (*setup, loop)))
        precision = "fp16_mixed" if "GradScaler" in text else "bf16_mixed" if "autocast" in text else "fp32"
        norms = [one for call in _calls(training, "clip_grad_norm_") for one in call.args[1:2]]
        values = [
            one.value for norm in norms for one in setup if isinstance(one, ast.Assign) and _defines(one, [_last(norm)])
        ]
        claims = [f"    max_norm = {self._text(one, {})}" for one in [*norms, *values] if isinstance(one, ast.Constant)]
        if not strategies:
            claims.append(f"    # TODO: {self.module} wraps its model in no strategy, so build() wraps it in DDP")
        source = _SCAFFOLD.format(module=self.module, claims="\n".join([*claims, "", "\n".join(methods)]))
        return Scaffold(f"{source.rstrip()}\n", strategies or ("ddp",), precision)

    def _roles(self, setup: Sequence[ast.stmt], training: Sequence[ast.stmt]) -> tuple[str, str, str]:
        """Return the names of model, optimizer and scheduler, the last empty if there is none."""
        stepped = [
            _last(one.args[0] if one.args else one.func.value)
            for one in _calls(training, "step")
            if isinstance(one.func, ast.Attribute)
        ]
        of_models = {name for one in setup if _calls([one], "parameters") for name in _names([one], ast.Store)}
        optimizer = next((name for name in stepped if name in of_models), next(iter(stepped), "optimizer"))
        made = [one for one in setup if _defines(one, [optimizer])]
        owners = [_last(one.func.value) for one in _calls(made, "parameters") if isinstance(one.func, ast.Attribute)]
        schedulers = [
            name
            for name in stepped
            if name != optimizer and any(optimizer in _names([one], ast.Load) for one in setup if _defines(one, [name]))
        ]
        return next(iter(owners), "model"), optimizer, next(iter(schedulers), "")

    def _needed(self, statements: Iterable[ast.AST], setup: Sequence[ast.stmt], given: Iterable[str]) -> list[ast.stmt]:
        """Return the statements of the setup that define what the statements use, except what is given."""
        known = {*given, *_RANK}
        needed = _names(statements, ast.Load) - known
        found: list[ast.stmt] = []
        for one in reversed(setup):
            if _defines(one, needed) and one not in statements and not _calls([one], "parse_args", "DataLoader"):
                found.insert(0, one)
                needed |= _names([one], ast.Load) - known
        return found

    def _batch(self, loop: ast.For, setup: Sequence[ast.stmt]) -> str:
        """Return the method that draws rows of the loop's dataset, by the number and the rank."""
        head = "batch(self, number, rank)"
        loaders = [one for one in setup if _defines(one, _names([loop.iter], ast.Load))]
        calls = _calls([loop.iter, *loaders], "DataLoader")
        given = {one.arg: one.value for call in calls for one in call.keywords}
        given |= {
            name: value for call in calls for name, value in zip(("dataset", "batch_size"), call.args, strict=False)
        }
        if "dataset" not in given:
            asked = f"{self.module}: return batch `number` of a rank, as `{ast.unparse(loop.iter)}` yields it"
            return self._method(head, _parsed(f"raise NotImplementedError({asked!r})  # TODO"))
        dataset, size = given["dataset"], given.get("batch_size", ast.Constant(_ROWS))
        collate = ast.unparse(given["collate_fn"]) if "collate_fn" in given else "torch.utils.data.default_collate"
        text = (
            "generator = torch.Generator().manual_seed(100 * number + rank)\n"
            f"rows = torch.randint(len(dataset), ({ast.unparse(size)},), generator=generator).tolist()\n"
            f"return {collate}([dataset[row] for row in rows])"
        )
        needed = [one for one in self._needed([dataset, size], setup, ()) if not _defines(one, ["dataset"])]
        needed += [one for one in setup if _defines(one, ["dataset"]) and ast.unparse(dataset) == "dataset"]
        needed += _parsed(f"dataset = {ast.unparse(dataset)}") if ast.unparse(dataset) != "dataset" else []
        # A dataset may draw its rows: each run has the same ones, and the model's random state stays as it is.
        seeded = _parsed("with torch.random.fork_rng(devices=[]):\n    torch.manual_seed(0)")
        cast("ast.With", seeded[0]).body += needed
        return self._method(head, [*seeded, *_parsed(text)])

    def _checkpoint(self, roles: Mapping[str, str]) -> Iterator[str]:
        """Yield ``save`` and ``load``: what the module gives torch.save, and the loading of each state in it."""
        saved = [
            one.args[0] for one in _calls([self.tree], "save") if ast.unparse(one.func) == "torch.save" and one.args
        ]
        pairs = [pair for one in saved if isinstance(one, ast.Dict) for pair in zip(one.keys, one.values, strict=True)]
        states = {ast.unparse(key): value for key, value in pairs if key and _names([value], ast.Load) <= {*roles}}
        if not states:
            asked = f"{self.module} saves nothing to resume from by torch.save({{...}}, path)"
            for head in ("save(self, directory)", "load(self, directory)"):
                yield self._method(head, _parsed(f"raise NotImplementedError({asked!r})  # TODO"))
            return
        whole = ", ".join(f"{key}: {ast.unparse(value)}" for key, value in states.items())
        save = f"state = {{{whole}}}\nif rank == 0:\n    torch.save(state, directory / 'checkpoint.pt')"
        yield self._method("save(self, directory)", _parsed(save), roles)
        load = ["state = torch.load(directory / 'checkpoint.pt', map_location=device)"]
        for key, value in states.items():
            owners = [one.func.value for one in _calls([value], "state_dict") if isinstance(one.func, ast.Attribute)]
            load += [f"{ast.unparse(one)}.load_state_dict(state[{key}])" for one in owners]
        yield self._method("load(self, directory)", _parsed("\n".join(load)), roles)

    def _text(self, node: ast.AST, renames: Mapping[str, str]) -> str:
        return ast.unparse(ast.fix_missing_locations(_Rename(renames, self.defaults).visit(copy.deepcopy(node))))

    def _method(self, head: str, body: Sequence[ast.stmt], renames: Mapping[str, str] | None = None) -> str:
        """Return the source of a method. What it uses and does not define is imported, or asked for."""
        parameters = {one.arg for one in _walk(_parsed(f"def {head}: ...")) if isinstance(one, ast.arg)}
        known = {name: value for name, value in _RANK.items() if name not in parameters}
        lines = [self._text(one, {**known, **(renames or {})}) for one in body]
        parsed = _parsed("\n".join(lines))
        inner = {one.arg for one in _walk(parsed) if isinstance(one, ast.arg)}
        used = _names(parsed, ast.Load) - _names(parsed, ast.Store) - parameters - inner
        imports = sorted({self.imports.get(name, "import torch") for name in used & {*self.imports, "torch"}})
        unknown = sorted(used - {*self.imports, *vars(builtins), "torch"})
        asked = [f"write what {', '.join(unknown)} of {self.module} should be here"] if unknown else []
        if self.trains_at_import and any(line.startswith(f"from {self.module} ") for line in imports):
            asked.append(f"{self.module} trains when it is imported: put that below if __name__ == '__main__'")
        lines = [*imports, *(f"raise NotImplementedError({one!r})  # TODO" for one in asked), *lines]
        return "\n".join([f"    def {head}:", *(f"        {line}" for text in lines for line in text.splitlines()), ""])


def _once(loop: ast.For, body: Sequence[ast.stmt], rank: str) -> ast.For:
    """Return the loop over one batch, so that it may ``continue``."""
    batch = f"self.batch(number, {rank})"
    batches = f"[(number, {batch})]" if _calls([loop.iter], "enumerate") else f"[{batch}]"
    return ast.For(loop.target, ast.parse(batches, mode="eval").body, list(body), [])


def _unwrapped(made: ast.stmt) -> ast.stmt:
    """Return the definition of a model without what moves or wraps it."""
    made = copy.deepcopy(made)
    value = getattr(made, "value", None)
    while isinstance(value, ast.Call) and _last(value.func) in {"to", "cuda", *_WRAPPERS}:
        value = value.args[0] if _last(value.func) in _WRAPPERS else getattr(value.func, "value", None)
        made.value = value  # type: ignore[attr-defined]  # an assignment
    return made
