"""Triton's interpreter as it is, but quicker: for children whose kernels it runs."""

import gc

from triton.runtime import interpreter


def hurry():
    """Have the interpreter do the same in less than half of the time."""
    # Its many small objects hold no cycles worth looking for: that took a sixth of the time.
    gc.set_threshold(100_000)
    interpreter._patch_lang = PatchedOnce(interpreter._patch_lang)
    interpreter._get_np_dtype = NumpyTypes(interpreter._get_np_dtype)
    # Without `debug` it looks for overflows in each operation, and says nothing of them.
    if not interpreter.interpreter_builder.options.debug:
        interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = lambda *_: None


class PatchedOnce:
    """Patch Triton's language once for each function of a launch.

    The interpreter puts its own functions in the language's place when a launch begins, and takes
    them back at its end. In between it does so again at each call of a function by a kernel, which
    is tens of thousands of times.
    """

    def __init__(self, patch):
        self._patch = patch
        self._scopes = {}  # by function: the first is the kernel's own

    def __call__(self, function):
        if function not in self._scopes:
            self._scopes[function] = self._patch(function)
        return self

    def restore(self):
        kernel, *_ = self._scopes.values()
        self._scopes = {}
        kernel.restore()  # the others' stay, as they do without this


class NumpyTypes:
    """Look a type of NumPy up: the interpreter makes its table of all of them for each."""

    def __init__(self, look_up):
        self._look_up = look_up
        self._found = {}

    def __call__(self, kind):
        scalar = kind.scalar
        if scalar.name not in self._found:
            self._found[scalar.name] = self._look_up(scalar)
        return self._found[scalar.name]
