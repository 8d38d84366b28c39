"""The user's own code, named as `package.module:thing`: imported when it is needed, and called as documented.

Promises: every mistake is a `UserError` that begins with the name and says what to change: a missing module, a module
that fails to import, a missing attribute, or a function that cannot be called with the documented arguments.
"""

from __future__ import annotations

import importlib
import inspect
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drumline.core.errors import UserError
from drumline.core.text import did_you_mean


def load_named(name: str, what: str, called: str, field: str = "") -> Callable[..., Any]:
    """The function, class or other callable that `package.module:thing` names. `what` begins the messages, `called`
    is the signature of the call, such as `(classes)`, and `field` is the recipe field if it is not `what`."""
    module_name, _, attribute = name.partition(":")
    if "/" in module_name or module_name.endswith(".py"):
        file = Path(module_name)
        raise UserError(
            f"{what} {name} names a file, not a module",
            fix=f"add the folder {file.parent} to PYTHONPATH and set {field or what}={file.stem}:"
            f"{attribute or 'factory'}",
        )
    if not module_name or not attribute:
        raise UserError(f"{what} {name!r} has no module or no factory", fix="write package.module:factory")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{what} {name}: importing {module_name} failed: it needs {error.name}, which is missing",
                fix=f"install {error.name}",
            ) from error
        raise UserError(
            f"{what} {name}: there is no module {error.name}",
            fix="install the package, or put the folder that holds it on PYTHONPATH",
        ) from error
    except Exception as error:  # a user's module may raise anything
        raise UserError(
            f"{what} {name}: importing {module_name} failed with {type(error).__name__}: {error}",
            fix=f"fix {module_name} so that `python -c 'import {module_name}'` succeeds",
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        callables = [known for known, value in vars(module).items() if callable(value)]
        problem = (
            f"has nothing called {attribute}" if found is None else f"has {attribute}, which is not callable"
        )
        raise UserError(
            f"{what} {name}: {module_name} {problem}",
            fix=did_you_mean(attribute, callables, f"define {attribute}{called} in {module_name}"),
        )
    return found


def accepts(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether a function can be called with these arguments, by its signature. Builtins may not have one."""
    signature = signature_of(function)
    try:
        if signature is not None:
            signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def line_of(error: BaseException) -> str:
    """The last line of the user's own code in a traceback, as ` at file:line`; empty if there is none."""
    ours = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]), "<")
    frames = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if not each.filename.startswith(ours) and "site-packages" not in each.filename
    ]
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def check_called(function: Callable[..., Any], title: str, called: str, what: str) -> None:
    """Rejects a function that cannot be called as `called`, such as `(logits, labels)`: `what` in plain words."""
    if not accepts(function, *called.split(",")):
        raise UserError(
            f"{title}: cannot be called as {called}; its signature is {signature_of(function)}",
            f"take {what} as the first two parameters, and give the others defaults",
        )


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """A function's signature, if it has one."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def instance(
    found: Callable[..., Any], title: str, arguments: Mapping[str, Any], called: str
) -> Callable[..., Any]:
    """The object to call. A class is constructed once, with those of `arguments` that it takes. `title` names it in
    messages."""
    if not isinstance(found, type):
        return found
    known = signature_of(found)
    taken = {name: value for name, value in arguments.items() if known and name in known.parameters}
    try:
        made = found(**taken)
    except Exception as error:  # a user's class may raise anything
        raise UserError(
            f"{title}: constructing it raised {type(error).__name__}: {error}",
            fix="give every parameter of its constructor a default, or name a function",
        ) from error
    if not callable(made):
        raise UserError(
            f"{title} is a class whose objects cannot be called", fix=f"give it a method __call__{called}"
        )
    return made
