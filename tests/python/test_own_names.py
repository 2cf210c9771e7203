"""Errors name the function that was called and one of its own arguments, whatever ran below it."""

import importlib
import inspect
import pkgutil
import re

import deltic
import deltic.fla
import pytest
import torch

# One batch, 8 tokens, 2 heads of 16 keys and 16 values: of a size, names tell what is what.
ROWS, HEADS, STATES = (1, 8, 2, 16), (1, 8, 2), (1, 2, 16, 16)
SHAPES = {
    **dict.fromkeys("q k v w u do dv dw du dk dg gk gv x dy z out".split(), ROWS),
    **dict.fromkeys(("beta", "g", "s", "dyg"), HEADS),
    **dict.fromkeys(("initial_state", "h0", "dht", "state_pool"), STATES),
    **dict.fromkeys(("h", "dh"), (1, 1, 2, 16, 16)),
    **dict.fromkeys(("A", "a"), (1, 8, 2, 64)),
    **dict.fromkeys(("A_log", "dt_bias", "g_gamma"), (2,)),
    "weight": (16,),
    "mask": (1, 8),
}
LISTS = {"cu_seqlens": [0, 8], "lens": [8], "ssm_state_indices": [0], "num_accepted_tokens": [1]}
# Functions on pools: their tensors and lists.
POOLS = {
    "commit": ({"record": (1, 4, 2, 33)}, {"accepted": [2], "read_index": [0]}),
    "step": (
        {
            **{"x": (1, 8, 96), "conv_weight": (96, 4), "conv_bias": (96,)},
            **{"conv_state": (1, 96, 3), "norm_weight": (16,)},
        },
        {"read_index": [0]},
    ),
    "move_states": ({"write_pool": STATES}, {"read_index": [0], "write_index": [0]}),
}
NUMBERS = {"chunk_size": 64, "nt_max": 4, "split_size": 4, "scale": 0.5, "lower_bound": -5.0}
# Arguments of any shape, and what nobody reads.
ANY_SHAPE = {"A_log", "dt_bias"}
NOT_READ = {"chunk_indices", "chunk_offsets", "cu_seqlens_cpu", "cp_context"}
NO_DTYPE = {"mask"}
SERVING = (
    "read_index write_index write_pool has_initial_state accepted parents positions state_index"
).split()


def of_the_surface():
    found = {}
    for module in pkgutil.walk_packages(deltic.fla.__path__, "deltic.fla."):
        if not any(part.startswith("_") for part in module.name.split(".")):
            for name, x in vars(importlib.import_module(module.name)).items():
                is_own = inspect.isfunction(x) and x.__module__ == module.name
                if is_own and not name.startswith("_") and name == x.__name__:
                    found[f"{module.name.removeprefix('deltic.fla.ops.')}.{name}"] = x
    del found["delta_rule.fused_chunk.fused_chunk_delta_rule"]  # always an error
    del found["utils.cumsum.local_cumsum"]  # a helper of the others
    return found


FUNCTIONS = of_the_surface() | {
    name: getattr(deltic, name)
    for name in deltic.__all__
    if inspect.isfunction(getattr(deltic, name))
    and "impl" in inspect.signature(getattr(deltic, name)).parameters
    and "conv" not in name
}


def arguments(path):
    """A call that runs, with every tensor that the function takes."""
    found, function = {}, FUNCTIONS[path]
    more_shapes, more_lists = POOLS.get(path, ({}, {}))
    shapes, lists = SHAPES | more_shapes, LISTS | more_lists
    if path.startswith("kda"):
        shapes |= {"g": ROWS, "dyg": ROWS, "dt_bias": (32,)}
    if "vector" in path:
        shapes |= {"g": ROWS, "s": ROWS}
    if path.startswith("delta_rule.naive"):
        shapes |= {"q": (1, 2, 8, 16), "k": (1, 2, 8, 16), "v": (1, 2, 8, 16), "beta": (1, 2, 8)}
    if path.startswith("utils.pack"):
        shapes["x"] = (8, 4) if "unpack" in path else (1, 8, 4)
    for name, parameter in inspect.signature(function).parameters.items():
        if name in lists:
            found[name] = torch.tensor(lists[name])
        elif name in shapes:
            found[name] = torch.rand(shapes[name]) - 1
        elif name in NUMBERS and "." in path:
            found[name] = NUMBERS[name]
        elif parameter.default is inspect.Parameter.empty and name != "kwargs":
            raise AssertionError(f"{path}: no value for {name}")
    if "use_gate_in_kernel" in inspect.signature(function).parameters:
        found["use_gate_in_kernel"] = True
        found |= {"A_log": torch.zeros(2), "dt_bias": torch.zeros(shapes["dt_bias"])}
    if "gate" in inspect.signature(function).parameters:
        found["gate"] = "softplus"
    if path == "delta_rule":
        found.pop("out"), found.pop("state_pool")
    if path in ("recurrent", "decode"):
        found.pop("gv"), found.pop("out")
    if function.__module__ == "deltic._blocks":
        del found["out"]
        found["out"] = function(**found)
    if "gk" in found and "g" in found and not path.startswith("common"):
        found.pop("gk")
    return {k: x for k, x in found.items() if k not in NOT_READ}


def spoilt(name, x):
    """What somebody may pass instead of a tensor, or of a number."""
    if not isinstance(x, torch.Tensor):
        return {"text": "a"} if isinstance(x, (int, float)) and not isinstance(x, bool) else {}
    other = torch.float32 if not x.is_floating_point() else torch.int32
    found = {"list": x.tolist(), "array": x.numpy(), "text": "a"}
    if name not in NO_DTYPE:
        found |= {"dtype": x.to(other), "complex": x.to(torch.complex64)}
    if name not in ANY_SHAPE:
        found["shape"] = x[None, None]
    return found


def has_any_shape(path, name):
    return name in ("x", "dy", "g", "dyg", "z") and ("gate" in path or path == "rms_norm")


@pytest.mark.parametrize("path", FUNCTIONS)
def test_own_names(path):
    function, given = FUNCTIONS[path], arguments(path)
    function(**given)
    name, parameters = function.__name__, {*inspect.signature(function).parameters, *given}
    named = re.compile(rf"^{name}: `?(\w+)\b")
    for argument, x in given.items():
        for kind, wrong in spoilt(argument, x).items():
            if kind == "shape" and has_any_shape(path, argument):
                continue
            with pytest.raises((TypeError, ValueError, AssertionError)) as error:
                function(**given | {argument: wrong})
            match = named.match(str(error.value))
            assert match is not None and match[1] in parameters, (argument, kind, str(error.value))


def test_slots_have_the_name_of_the_surface():
    fused = FUNCTIONS["kda.fused_recurrent.fused_recurrent_kda_fwd"]
    given = arguments("kda.fused_recurrent.fused_recurrent_kda_fwd")
    for state in (given["initial_state"], given["initial_state"].half()):
        text = "^fused_recurrent_kda_fwd: ssm_state_indices: expected .*, got 7"
        with pytest.raises(ValueError, match=text):
            wrong = {"initial_state": state, "ssm_state_indices": torch.tensor([7])}
            fused(**given | wrong)
