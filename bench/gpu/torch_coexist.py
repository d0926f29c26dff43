#!/usr/bin/env python3
"""Doorbell inside a PyTorch process: does each leave the other alone?

    python3 bench/gpu/torch_coexist.py [DIST]      DIST: what `cargo xtask dist` made (default target/dist)

Uses nothing of Doorbell but libdoorbell.so and doorbell.ptx. A small network trains on a stream of its own in a thread; meanwhile kernels
post puts from and into tensors and pinned memory, a CUDA graph with a posting kernel is captured and replayed, a work request fails
and the queue pair comes back, a forked child is refused, and everything is torn down while the training goes on.
Prints a line a check. Exit status 0: all passed; 1: one failed; 2: one hung; 77: skipped, with the reason.
"""

import ctypes
import os
import signal
import struct
import sys
import threading
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
DIST = sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "..", "..", "target", "dist")
SECOND = 1_000_000_000
WATCHDOG = 50  # seconds for everything
REPLAYS = 50

try:
    import torch
except ImportError as e:
    print(f"SKIP: no PyTorch here: {e}")
    sys.exit(77)
if not torch.cuda.is_available():
    print("SKIP: PyTorch finds no CUDA GPU here")
    sys.exit(77)

failed = []


def check(name, ok, remark=""):
    print(f"{'PASS' if ok else 'FAIL'} {name}{': ' if remark else ''}{remark}", flush=True)
    if not ok:
        failed.append(name)


def watchdog():
    time.sleep(WATCHDOG)
    print(f"FAIL hung: not at the end after {WATCHDOG} s", flush=True)
    for thread, frame in sys._current_frames().items():
        print(f"thread {thread}:\n{''.join(traceback.format_stack(frame, 4))}", flush=True)
    os._exit(2)


class Info(ctypes.Structure):  # doorbell_device_info
    _fields_ = [("size", ctypes.c_size_t), ("name", ctypes.c_char * 128), ("pci", ctypes.c_char * 32)] + [
        (n, ctypes.c_int32) for n in ("is_cuda", "ordinal", "numa_node")
    ] + [(n, ctypes.c_uint32) for n in ("sms", "major", "minor", "driver_major", "driver_minor", "cores", "reserved")]


class Attr(ctypes.Structure):  # doorbell_device_attr
    _fields_ = [("size", ctypes.c_size_t), ("gpu", ctypes.c_char_p), ("cores", ctypes.c_uint32), ("flags", ctypes.c_uint32),
                ("quiesce_ns", ctypes.c_uint64)]


class Region(ctypes.Structure):  # doorbell_mr_info
    _fields_ = [("size", ctypes.c_size_t), ("address", ctypes.c_uint64), ("length", ctypes.c_uint64), ("key", ctypes.c_uint32),
                ("access", ctypes.c_uint32)]


class QpError(ctypes.Structure):  # doorbell_qp_error_info
    _fields_ = [("size", ctypes.c_size_t)] + [(n, ctypes.c_uint32) for n in ("kind", "syndrome", "vendor", "index")] + [
        ("text", ctypes.c_char * 400)]


class Handle(ctypes.Structure):  # doorbell_qp_t
    _fields_ = [("qp", ctypes.c_void_p), ("ext", ctypes.c_void_p)]


lib = ctypes.CDLL(os.path.join(DIST, "lib", "libdoorbell.so.0"))
lib.doorbell_last_error.restype = ctypes.c_char_p
cuda = ctypes.CDLL("libcuda.so.1")
P, U32, U64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
ALL, HOST, GPU, UNSUPPORTED = 15, 1, 0, -4


def db(name, *args):
    """A function of doorbell.h; an exception with its text when it fails."""
    status = getattr(lib, name)(*args)
    if status != 0:
        raise RuntimeError(f"{name} gave {status}: {lib.doorbell_last_error().decode()}")


def made(name, *args):
    out = P()
    db(name, *args, ctypes.byref(out))
    return out


def cu(name, *args):
    code = getattr(cuda, name)(*args)
    if code != 0:
        raise RuntimeError(f"{name} gave {code}")


def current_context():
    context = P()
    cu("cuCtxGetCurrent", ctypes.byref(context))
    return context.value


class Mem:
    """Registered memory: Doorbell's own, or a tensor's."""

    def __init__(self, device, pd, kind=None, length=0, tensor=None):
        self.tensor = tensor
        if tensor is not None:
            length = tensor.numel() * tensor.element_size()
            self.mem = made("doorbell_mem_import", device, U64(tensor.data_ptr()), ctypes.c_size_t(length), ctypes.c_int32(1))
        else:
            self.mem = made("doorbell_mem_alloc", device, U32(kind), ctypes.c_size_t(length))
        self.length = length
        address, host = U64(), P()
        db("doorbell_mem_query", self.mem, ctypes.byref(address), ctypes.byref(host), None)
        self.device_address = address.value
        self.mr = made("doorbell_mr_register", pd, self.mem, U32(ALL), U32(0))
        self.region = Region(ctypes.sizeof(Region))
        db("doorbell_mr_query", self.mr, ctypes.byref(self.region))

    def write(self, data, offset=0):
        db("doorbell_mem_write", self.mem, ctypes.c_size_t(offset), data, ctypes.c_size_t(len(data)))

    def read(self, length=None, offset=0):
        length = self.length if length is None else length
        data = ctypes.create_string_buffer(length)
        db("doorbell_mem_read", self.mem, ctypes.c_size_t(offset), data, ctypes.c_size_t(length))
        return data.raw

    def end(self):
        db("doorbell_mr_deregister", self.mr, U64(5 * SECOND))
        db("doorbell_mem_free", self.mem)


class Training(threading.Thread):
    """A network that trains on a stream of its own until it is told to stop."""

    def __init__(self):
        super().__init__(daemon=True)
        self.steps, self.error, self.losses = 0, None, []
        self.go, self.stop = threading.Event(), threading.Event()
        self.idle = threading.Event()
        self.go.set()

    def run(self):
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                net = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).cuda()
                best = torch.optim.AdamW(net.parameters(), lr=1e-3)
                x = torch.randn(4096, 512, device="cuda")
                while not self.stop.is_set():
                    if not self.go.is_set():
                        stream.synchronize()
                        self.idle.set()
                        self.go.wait()
                        self.idle.clear()
                    loss = torch.nn.functional.mse_loss(net(x), x)
                    loss.backward()
                    best.step()
                    best.zero_grad(set_to_none=True)
                    self.steps += 1
                    if self.steps % 8 == 0:
                        self.losses.append(loss.item())
                stream.synchronize()
        except Exception as e:  # what the check reports
            self.error = e

    def pause(self):
        self.go.clear()
        if not self.idle.wait(10):
            raise RuntimeError("the training does not pause")

    def progresses(self, within=10):
        """Does it make steps, and were there no errors?"""
        before, until = self.steps, time.monotonic() + within
        while self.steps < before + 3 and self.error is None and time.monotonic() < until:
            time.sleep(0.005)
        return self.error is None and self.steps >= before + 3


class Poster:
    """The kernel `put_bw` of doorbell.ptx on one queue pair."""

    def __init__(self, device, pd, function, handle):
        self.function = function
        self.room = Mem(device, pd, HOST, 1 << 16)
        self.room.write(struct.pack("<QQ", handle.qp or 0, handle.ext or 0))

    def prepare(self, local, remote, size, messages, threads=1, key=None, run_ns=0, sharing=0):
        base = self.room.device_address
        per_thread = size * messages
        mask = messages - 1
        if run_ns:
            messages = 1 << 40
        self.threads = threads
        self.room.write(bytes(threads * 32), 1024)
        rate = struct.pack("<Q6I4Q", base, 1, sharing, 0, 0, 1, 0, size, messages, run_ns, 10 * SECOND)
        rate += struct.pack("<QQII", local.region.address, per_thread, local.region.key, mask)
        rate += struct.pack("<QQII", remote.region.address, per_thread, remote.region.key if key is None else key, mask)
        rate += struct.pack("<QIIQ", 0, 0, 0, base + 1024)
        assert len(rate) == 136
        self.room.write(rate, 256)

    def launch(self, stream):
        argument = U64(self.room.device_address + 256)
        arguments = (P * 1)(ctypes.cast(ctypes.byref(argument), P))
        cu("cuLaunchKernel", self.function, 1, 1, 1, self.threads, 1, 1, 0, P(stream.cuda_stream), arguments, None)

    def statuses(self):
        """(error, posted, completed) a thread."""
        data = self.room.read(self.threads * 32, 1024)
        return [struct.unpack_from("<QQQQ", data, t * 32)[:3] for t in range(self.threads)]


def finish(stream, within=15):
    until = time.monotonic() + within
    while not stream.query():
        if time.monotonic() > until:
            raise RuntimeError(f"a kernel has not ended after {within} s")
        time.sleep(0.0005)


def main():
    threading.Thread(target=watchdog, daemon=True).start()
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    context = current_context()
    training = Training()
    training.start()
    check("training alone", training.progresses(20), str(training.error or f"{training.steps} steps"))

    # ---- open beside it
    began = time.monotonic()
    attr = Attr(ctypes.sizeof(Attr), f"cuda:{torch.cuda.current_device()}".encode(), 1, 0, 0)
    device = made("doorbell_device_open", ctypes.byref(attr))
    info = Info(ctypes.sizeof(Info))
    db("doorbell_device_query", device, ctypes.byref(info))
    check("open", info.is_cuda == 1, f"{info.name.decode()} in {time.monotonic() - began:.2f} s, beside PyTorch {torch.__version__}")
    check("context", current_context() == context, "PyTorch's primary context is current, as before")
    image = open(os.path.join(DIST, "ptx", "doorbell.ptx"), "rb").read() + b"\0"
    module, function = P(), P()
    began = time.monotonic()
    cu("cuModuleLoadData", ctypes.byref(module), image)
    cu("cuModuleGetFunction", ctypes.byref(function), module, b"put_bw")
    check("module", True, f"doorbell.ptx loaded into PyTorch's context in {time.monotonic() - began:.2f} s")

    pd = made("doorbell_pd_alloc", device)
    qp = made("doorbell_qp_create", pd, None)
    db("doorbell_qp_connect_local", qp, qp)
    handle = Handle()
    db("doorbell_qp_export", qp, ctypes.byref(handle))
    poster = Poster(device, pd, function, handle)
    stream = torch.cuda.Stream()
    side = torch.cuda.Stream()

    # ---- puts, every byte compared, from and to both kinds of memory
    size, messages, threads = 64, 64, 32
    length = size * messages * threads
    data = bytes((i * 7 + (i >> 8) + 1) & 0xFF for i in range(length))
    for source_kind, target_kind in (("host", "host"), ("tensor", "host"), ("host", "tensor"), ("tensor", "tensor")):
        tensors = {}
        mems = {}
        for side_name, kind in (("source", source_kind), ("target", target_kind)):
            if kind == "tensor":
                tensors[side_name] = torch.zeros(length, dtype=torch.uint8, device="cuda")
                torch.cuda.current_stream().synchronize()
                mems[side_name] = Mem(device, pd, tensor=tensors[side_name])
            else:
                mems[side_name] = Mem(device, pd, HOST, length)
        if source_kind == "tensor":
            tensors["source"].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            torch.cuda.current_stream().synchronize()
        else:
            mems["source"].write(data)
        before = training.steps
        began = time.monotonic()
        poster.prepare(mems["source"], mems["target"], size, messages, threads, sharing=1)
        poster.launch(stream)
        finish(stream)
        took = time.monotonic() - began
        errors = [s for s in poster.statuses() if s != (0, messages, messages)]
        if target_kind == "tensor":
            got = bytes(tensors["target"].cpu().numpy().tobytes())
        else:
            got = mems["target"].read()
        check(f"puts {source_kind} to {target_kind}", not errors and got == data,
              f"{length} bytes compared, {threads * messages} puts in {took * 1e3:.1f} ms, {training.steps - before} training steps"
              f"{' ' + str(errors[:2]) if errors else ''}")
        for mem in mems.values():
            mem.end()
    check("training beside puts", training.progresses(), str(training.error or ""))

    # ---- a CUDA graph: a kernel of PyTorch's writes the tensor, ours posts it and waits
    tensor = torch.zeros(4096, dtype=torch.int32, device="cuda")
    torch.cuda.current_stream().synchronize()
    source = Mem(device, pd, tensor=tensor)
    target = Mem(device, pd, HOST, 16384)
    long_source, long_target = Mem(device, pd, HOST, 65536), Mem(device, pd, HOST, 65536)
    qp2 = made("doorbell_qp_create", pd, None)
    db("doorbell_qp_connect_local", qp2, qp2)
    handle2 = Handle()
    db("doorbell_qp_export", qp2, ctypes.byref(handle2))
    busy = Poster(device, pd, function, handle2)
    # Puts are under way while the graph is captured: what the engine calls meanwhile must not spoil the capture. The training
    # pauses, since PyTorch itself forbids other threads' allocations then.
    training.pause()
    busy.prepare(long_source, long_target, 64, 64, 1, run_ns=SECOND // 5)
    poster.prepare(source, target, 512, 32)
    poster.launch(stream)  # not captured: loads whatever is loaded lazily
    finish(stream)
    busy.launch(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        tensor.add_(1)
        poster.launch(torch.cuda.current_stream())
    finish(side)
    check("capture", True, "with puts under way on another stream")
    training.go.set()
    wrong = None
    before = training.steps
    began = time.monotonic()
    for n in range(1, REPLAYS + 1):
        with torch.cuda.stream(stream):
            graph.replay()
        finish(stream)
        got = target.read()
        if got != struct.pack("<i", n) * 4096 or poster.statuses() != [(0, 32, 32)]:
            wrong = f"replay {n}: {poster.statuses()}, first word {struct.unpack_from('<i', got)[0]}"
            break
    took = time.monotonic() - began
    check("graph", wrong is None, wrong or f"{REPLAYS} replays with new bytes each, {took / REPLAYS * 1e3:.2f} ms a replay, "
          f"{training.steps - before} training steps")
    check("training beside graphs", training.progresses(), str(training.error or ""))

    # ---- a wrong key: an error here, nothing else
    poster.prepare(source, target, 512, 1, key=0x12345678)
    poster.launch(stream)
    finish(stream)
    error = QpError(ctypes.sizeof(QpError))
    db("doorbell_qp_error", qp, ctypes.byref(error))
    check("a wrong key", error.kind == 1 and poster.statuses()[0][0] != 0, error.text.decode())
    db("doorbell_qp_reset", qp, U64(5 * SECOND))
    db("doorbell_qp_connect_local", qp, qp)
    poster.prepare(source, target, 512, 32)
    poster.launch(stream)
    finish(stream)
    check("after a reset", poster.statuses() == [(0, 32, 32)], str(poster.statuses()))
    check("context after all", current_context() == context)

    # ---- a forked child is told so
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        out = P()
        status = lib.doorbell_mem_alloc(device, U32(HOST), ctypes.c_size_t(4096), ctypes.byref(out))
        text = lib.doorbell_last_error().decode()
        os._exit(0 if status == UNSUPPORTED and "fork" in text else 1)
    _, status = os.waitpid(child, 0)
    check("fork", status == 0, "the child is refused" if status == 0 else f"the child ended with {status}")

    # ---- the end, while the training goes on
    began = time.monotonic()
    for owner in (source, target, long_source, long_target):
        owner.end()
    for queue in (qp, qp2):
        db("doorbell_qp_destroy", queue, U64(5 * SECOND))
    poster.room.end()
    busy.room.end()
    db("doorbell_pd_free", pd)
    db("doorbell_device_close", device)
    check("teardown", True, f"{time.monotonic() - began:.2f} s")
    check("training after teardown", training.progresses(), str(training.error or f"{training.steps} steps in all"))
    training.stop.set()
    training.join(15)
    finite = bool(training.losses) and all(loss == loss and loss < 1e6 for loss in training.losses)
    check("training", not training.is_alive() and finite and training.losses[-1] < training.losses[0],
          f"loss {training.losses[0]:.4f} to {training.losses[-1]:.4f}" if training.losses else "no step")
    torch.cuda.synchronize()
    check("PyTorch works on", int(torch.arange(1000, device="cuda").sum().item()) == 499500)
    check("context at the end", current_context() == context)


try:
    main()
except Exception as e:
    traceback.print_exc()
    check("run", False, str(e))
print(f"FAIL {len(failed)} checks" if failed else "PASS all", flush=True)
# Not through destructors: a training thread may still run after a failure.
sys.stdout.flush()
os._exit(1 if failed else 0)
