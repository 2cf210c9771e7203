"""The C ABI of libdeltic through ctypes, for tensors of torch: as much as the comparison needs."""

import ctypes as c

import torch

ABI = 2
MAX_RANK = 6
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int32: 4, torch.int64: 5}


class Tensor(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("dtype", c.c_int32),
        ("device_type", c.c_int32),
        ("device_index", c.c_int32),
        ("rank", c.c_int32),
        ("shape", c.c_int64 * MAX_RANK),
        ("strides", c.c_int64 * MAX_RANK),
    ]


class Options(c.Structure):
    _fields_ = [
        ("size", c.c_uint64),
        ("gate_form", c.c_int32),
        ("beta_form", c.c_int32),
        ("state_layout", c.c_int32),
        ("split", c.c_int32),
        ("segment_length", c.c_int64),
        ("chunk", c.c_int32),
        ("qk_l2norm", c.c_int32),
        ("reverse", c.c_int32),
        ("has_scale", c.c_int32),
        ("scale", c.c_float),
        ("has_lower_bound", c.c_int32),
        ("lower_bound", c.c_float),
        ("num_threads", c.c_int32),
        ("checked", c.c_int32),
        ("save", c.c_int32),
        ("impl", c.c_char_p),
        ("activation", c.c_int32),
        ("reserved", c.c_int32),
    ]


class Buffer(c.Structure):
    _fields_ = [("data", c.c_void_p), ("bytes", c.c_uint64)]


class Tensors(c.Structure):
    _fields_ = (
        [("size", c.c_uint64)]
        + [
            (name, Tensor)
            for name in (
                "q k v o beta g gv A_log dt_bias cu_seqlens cu_seqlens_host initial_state "
                "final_state state_pool read_index write_index ckpt_cu ckpt_tokens ckpt_slots "
                "ckpt_states"
            ).split()
        ]
        + [("saved", Buffer)]
    )


class BackwardTensors(c.Structure):
    _fields_ = [("size", c.c_uint64), ("forward", c.POINTER(Tensors))] + [
        (name, Tensor)
        for name in (
            "d_o d_final_state dq dk dv dbeta dg dgv dA_log ddt_bias d_initial_state"
        ).split()
    ]


EXPLAIN = c.CFUNCTYPE(None, c.c_void_p, c.c_char_p, c.c_int32, c.c_int32, c.c_char_p)
INFO = c.CFUNCTYPE(None, c.c_void_p, c.c_char_p, c.c_char_p)
OPS = {"forward": 0, "decode": 1}


class Library:
    def __init__(self, path):
        self.lib = c.CDLL(str(path))
        self.lib.deltic_last_error.restype = c.c_char_p
        self.lib.deltic_version.restype = c.c_char_p
        self.version = self.lib.deltic_version().decode()
        # The structs above are those of this ABI; the library's own may have grown since.
        self.check(self.lib.deltic_check_abi(ABI))

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.lib.deltic_last_error().decode())

    def info(self):
        facts = {}

        def note(_, key, value):
            facts[key.decode()] = value.decode()

        self.check(self.lib.deltic_info(INFO(note), None))
        return facts

    def call(self, op, threads, **tensors):
        """A prepared call: an object to call again and again, with its implementation's name."""
        return Call(self, op, threads, tensors)


def fill(struct, tensors):
    """Views of torch tensors in the fields of these names."""
    for name, tensor in tensors.items():
        view = getattr(struct, name)
        view.data = tensor.data_ptr()
        view.dtype = DTYPES[tensor.dtype]
        view.rank = tensor.dim()
        for i in range(tensor.dim()):
            view.shape[i] = tensor.shape[i]
            view.strides[i] = tensor.stride(i)


class Memory:
    """64-byte aligned bytes, written once so that they are there."""

    def __init__(self, size):
        self.storage = torch.zeros(size + 64, dtype=torch.uint8)
        start = (self.storage.data_ptr() + 63) // 64 * 64
        self.buffer = Buffer(start if size > 0 else None, size)


class Call:
    def __init__(self, library, op, threads, tensors, save=0):
        self.library = library
        self.keep = tensors  # the views own nothing
        self.options = Options(size=c.sizeof(Options), qk_l2norm=1, num_threads=threads, save=save)
        self.tensors = Tensors(size=c.sizeof(Tensors))
        fill(self.tensors, tensors)
        lib = library.lib
        self.run = getattr(lib, f"deltic_{op}")
        if save:
            self.saved = Memory(self.query(lib.deltic_forward_saved))
            self.tensors.saved = self.saved.buffer
        self.workspace = Memory(self.query(getattr(lib, f"deltic_{op}_workspace"), None))
        self.impl = None

        def note(_, name, accepts, chosen, sentence):
            if chosen:
                self.impl = name.decode()

        library.check(
            lib.deltic_explain(
                OPS[op], c.byref(self.options), c.byref(self.tensors), EXPLAIN(note), None
            )
        )

    def query(self, function, *stream):
        need = c.c_uint64()
        self.library.check(
            function(c.byref(self.options), c.byref(self.tensors), *stream, c.byref(need))
        )
        return need.value

    def __call__(self):
        self.library.check(
            self.run(
                c.byref(self.options),
                c.byref(self.tensors),
                c.byref(self.workspace.buffer),
                None,
            )
        )


class Training:
    """Forward that keeps what `save` says (1: states, 2: all), and the backward call after it."""

    def __init__(self, library, threads, tensors, d_o, gradients, save):
        self.forward = Call(library, "forward", threads, tensors, save)
        self.backward = Call.__new__(Call)
        back = self.backward
        back.library, back.run = library, library.lib.deltic_backward
        back.keep = (d_o, gradients)
        back.options = Options(size=c.sizeof(Options), qk_l2norm=1, num_threads=threads)
        back.tensors = BackwardTensors(size=c.sizeof(BackwardTensors))
        back.inputs = Tensors(size=c.sizeof(Tensors), saved=self.forward.saved.buffer)
        fill(back.inputs, {n: t for n, t in tensors.items() if n != "o"})
        back.tensors.forward = c.pointer(back.inputs)
        fill(back.tensors, {"d_o": d_o} | {f"d{name}": t for name, t in gradients.items()})
        back.workspace = Memory(back.query(library.lib.deltic_backward_workspace, None))
        self.impl = self.forward.impl

    @property
    def extra_bytes(self):
        """Saved bytes and the larger workspace: all the memory besides inputs and gradients."""
        work = max(self.forward.workspace.buffer.bytes, self.backward.workspace.buffer.bytes)
        return self.forward.saved.buffer.bytes + work

    def __call__(self):
        self.forward()
        self.backward()
