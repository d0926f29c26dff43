// NVIDIA's public GPUNetIO device headers, unchanged, driving Doorbell's queues: kernels with the names and the parameter
// structure of Doorbell's own `put_bw` and `post`, for `doorbell perf ... --module nvidia_poster.cubin`.
//
//   nvcc -cubin -arch=sm_90 -O3 -std=c++17 -I$DOCA -o nvidia_poster.cubin nvidia_poster.cu
//
// DOCA is the folder that holds doca_gpunetio_device.h, from an installed copy: in an NCCL 2.30.3 or newer wheel it is
// nvidia/nccl/include/nccl_device/gin/gdaki/doca_gpunetio. The headers are never part of this repository.
#include <cstddef>
#include <cstdint>

// NCCL's copy of the headers expects this from NCCL.
#ifndef NVCC_PRAGMA_UNROLL_DISABLED
#define NVCC_PRAGMA_UNROLL_DISABLED _Pragma("unroll 1")
#endif
#include <doca_gpunetio_device.h>

namespace {

// doorbell_kernels::params, field for field.
struct Area {
    uint64_t addr, stride;
    uint32_t key, mask;
};
struct Rate {
    uint64_t qps;
    uint32_t qp_count, sharing, op, flags, batch, reserved;
    uint64_t size, iters, run_ns, deadline_ns;
    Area local, remote;
    uint64_t signal;
    uint32_t signal_key, reserved2;
    uint64_t status;
};
static_assert(sizeof(Rate) == 136 && offsetof(Rate, size) == 32 && offsetof(Rate, local) == 64 && offsetof(Rate, remote) == 88 &&
                  offsetof(Rate, signal) == 112 && offsetof(Rate, status) == 128,
              "the parameter structure has changed");
struct Handle {
    doca_gpu_dev_verbs_qp *qp;
    void *ext;
};
static_assert(sizeof(doca_gpu_dev_verbs_qp) == 296, "these headers have another QP layout");
struct Status {
    uint64_t error, posted, completed, ns;
};

enum : uint32_t { NO_SPACE_CHECK = 1, NO_WAIT = 2, QP_BY_THREAD = 64 };
enum : uint32_t { PUT = 0, PUT_VALUE = 1, GET = 2, FETCH_ADD = 3, PUT_SIGNAL = 4 };
// doorbell_device::Error codes that these kernels can report.
constexpr uint64_t INVALID = 7, TIMED_OUT = 2;

__device__ uint64_t now_ns() {
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

template <doca_gpu_dev_verbs_resource_sharing_mode M, doca_gpu_dev_verbs_nic_handler H>
__device__ void messages(const Rate &p, doca_gpu_dev_verbs_qp *qp, uint32_t flags, uint64_t me, Status &status) {
    const uint64_t start = now_ns();
    const uint32_t lkey = __byte_perm(p.local.key, 0, 0x0123), rkey = __byte_perm(p.remote.key, 0, 0x0123),
                   skey = __byte_perm(p.signal_key, 0, 0x0123);
    const uint32_t room = flags & NO_SPACE_CHECK ? DOCA_GPUNETIO_VERBS_GPU_CODE_OPT_SKIP_AVAILABILITY_CHECK : 0;
    doca_gpu_dev_verbs_ticket_t ticket = 0;
    uint64_t look = 1, message = 0, in_batch = 0;
    while (message < p.iters) {
        // No call of these headers posts several WQEs with one ring: all but the last of a batch skip theirs.
        uint32_t opt = room;
        if (++in_batch < p.batch && message + 1 < p.iters)
            opt |= DOCA_GPUNETIO_VERBS_GPU_CODE_OPT_SKIP_DB_RINGING;
        else
            in_batch = 0;
        doca_gpu_dev_verbs_addr raddr, laddr, saddr;
        raddr.addr = p.remote.addr + me * p.remote.stride + (message & p.remote.mask) * p.size;
        raddr.key = rkey;
        laddr.addr = p.local.addr + me * p.local.stride + (message & p.local.mask) * p.size;
        laddr.key = lkey;
        switch (p.op) {
        case PUT:
            doca_gpu_dev_verbs_put<M, H>(qp, raddr, laddr, p.size, &ticket, opt);
            break;
        case PUT_VALUE:
            doca_gpu_dev_verbs_p<uint64_t, M, H>(qp, raddr, message + 1, &ticket, opt);
            break;
        case GET: {
            doca_gpu_dev_verbs_addr none = laddr;
            doca_gpu_dev_verbs_get<M, H>(qp, raddr, laddr, p.size, none, &ticket, opt);
            break;
        }
        case FETCH_ADD:
            doca_gpu_dev_verbs_signal<DOCA_GPUNETIO_VERBS_SIGNAL_OP_ADD, M, H>(qp, raddr, laddr, 1, &ticket, opt);
            break;
        case PUT_SIGNAL: {
            saddr.addr = p.signal;
            saddr.key = skey;
            doca_gpu_dev_verbs_put_signal<DOCA_GPUNETIO_VERBS_SIGNAL_OP_ADD, M, H>(qp, raddr, laddr, p.size, saddr, laddr, 1,
                                                                                  &ticket, opt);
            break;
        }
        default:
            status.error = INVALID;
            return;
        }
        status.posted = ++message;
        if (message >= look) {
            // A thread that shares a QP with all others may need milliseconds for a message.
            look = message + (M == DOCA_GPUNETIO_VERBS_RESOURCE_SHARING_MODE_GPU ? 1 : 64);
            const uint64_t now = now_ns();
            if (p.run_ns != 0 && now - start >= p.run_ns && in_batch == 0) break;
            if (now - start >= p.deadline_ns) {
                status.error = TIMED_OUT;
                return;
            }
        }
    }
    if (!(flags & NO_WAIT)) {
        if (message != 0) doca_gpu_dev_verbs_wait<M, H>(qp, ticket);
        status.completed = message;
    }
}

template <doca_gpu_dev_verbs_resource_sharing_mode M>
__device__ void by_handler(const Rate &p, doca_gpu_dev_verbs_qp *qp, uint32_t flags, uint64_t me, Status &status) {
    switch (qp->nic_handler) {
    case DOCA_GPUNETIO_VERBS_NIC_HANDLER_GPU_SM_DB:
        return messages<M, DOCA_GPUNETIO_VERBS_NIC_HANDLER_GPU_SM_DB>(p, qp, flags, me, status);
    case DOCA_GPUNETIO_VERBS_NIC_HANDLER_GPU_SM_NO_DBR:
        return messages<M, DOCA_GPUNETIO_VERBS_NIC_HANDLER_GPU_SM_NO_DBR>(p, qp, flags, me, status);
    default:
        return messages<M, DOCA_GPUNETIO_VERBS_NIC_HANDLER_CPU_PROXY>(p, qp, flags, me, status);
    }
}

__device__ void run(const Rate *params, uint32_t more_flags, int op = -1) {
    Rate p = *params;
    if (op >= 0) p.op = op;
    const uint32_t flags = p.flags | more_flags;
    const uint64_t start = now_ns();
    const uint64_t me = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    Status status = {0, 0, 0, 0};
    if (p.qp_count == 0 || p.batch == 0) {
        status.error = INVALID;
    } else {
        const uint32_t which = flags & QP_BY_THREAD ? uint32_t(me) : blockIdx.x;
        doca_gpu_dev_verbs_qp *qp = reinterpret_cast<const Handle *>(p.qps)[which % p.qp_count].qp;
        switch (p.sharing) {
        case 0:
            by_handler<DOCA_GPUNETIO_VERBS_RESOURCE_SHARING_MODE_EXCLUSIVE>(p, qp, flags, me, status);
            break;
        case 1:
            by_handler<DOCA_GPUNETIO_VERBS_RESOURCE_SHARING_MODE_CTA>(p, qp, flags, me, status);
            break;
        default:
            by_handler<DOCA_GPUNETIO_VERBS_RESOURCE_SHARING_MODE_GPU>(p, qp, flags, me, status);
        }
    }
    status.ns = now_ns() - start;
    reinterpret_cast<Status *>(p.status)[me] = status;
}

} // namespace

extern "C" __global__ void put_bw(const Rate *p) { run(p, 0); }
extern "C" __global__ void get_bw(const Rate *p) { run(p, 0, GET); }
extern "C" __global__ void atomic_rate(const Rate *p) { run(p, 0, FETCH_ADD); }
extern "C" __global__ void post(const Rate *p) { run(p, NO_SPACE_CHECK | NO_WAIT); }
