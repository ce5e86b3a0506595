"""The native module. Programs use the package `aquifer`, which documents what is here."""

__version__: str

def _fail(what: str) -> None: ...
