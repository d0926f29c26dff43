/* Doorbell: queues, memory and connections for GPU-initiated networking. The host side, for C, C++ and CUDA C++.
 *
 * A program opens a device, allocates or brings memory, registers it, creates queue pairs, connects them, and exports them to the
 * GPU. Kernels then post and wait with the functions of doorbell_device.h; no CPU call is on that path.
 *
 * Rules that hold for every function:
 *  - It returns 0 (DOORBELL_OK) or a negative status. doorbell_last_error() has the text: object, value, remedy.
 *  - It may be called from any thread. It never blocks without a limit: timeout_ns is in nanoseconds, 0 means "only try".
 *  - Handles are names, not addresses. Using one that was destroyed gives DOORBELL_ERR_HANDLE, never undefined behaviour.
 *  - Parents outlive children by themselves: closing a device whose queue pairs live only takes its name away.
 *  - Structures begin with their size. Start from the _INIT macro: zero means "default" in every field, so a program compiled against
 *    an older header goes on working.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef DOORBELL_H
#define DOORBELL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DOORBELL_VERSION_MAJOR 0
#define DOORBELL_VERSION_MINOR 1

#ifndef DOORBELL_API
#define DOORBELL_API __attribute__((visibility("default")))
#endif

/* ------------------------------------------------------------------------------------------------ statuses */

typedef int32_t doorbell_status;

#define DOORBELL_OK 0
#define DOORBELL_ERR_INVALID (-1)     /* an argument is out of range or NULL */
#define DOORBELL_ERR_HANDLE (-2)      /* the handle is unknown: never created, of another kind, or already destroyed */
#define DOORBELL_ERR_VERSION (-3)     /* a structure or a peer is of a version that this library does not know */
#define DOORBELL_ERR_UNSUPPORTED (-4) /* this device or build cannot do it */
#define DOORBELL_ERR_NO_GPU (-5)      /* the GPU that was asked for is not there, or its driver refused */
#define DOORBELL_ERR_NO_MEMORY (-6)   /* memory of the kind that was asked for cannot be had */
#define DOORBELL_ERR_TIMED_OUT (-7)   /* the time given ran out */
#define DOORBELL_ERR_STATE (-8)       /* the object is in a state that does not allow it */
#define DOORBELL_ERR_COMPLETION (-9)  /* a work request ended in an error; doorbell_qp_error has the syndromes */
#define DOORBELL_ERR_PEER (-10)       /* the peer process is gone or refused */
#define DOORBELL_ERR_SYSTEM (-11)     /* the operating system refused */
#define DOORBELL_ERR_INTERNAL (-12)   /* a fault of the library itself; please report it */

/* The text of the last call of this thread that failed. Never NULL; valid until the thread's next failing call. */
DOORBELL_API const char *doorbell_last_error(void);
/* The status of the last call of this thread that failed. */
DOORBELL_API doorbell_status doorbell_last_status(void);
/* What a status means. Never NULL, valid for ever. */
DOORBELL_API const char *doorbell_status_text(doorbell_status status);
/* "0.1.0". Never NULL, valid for ever. */
DOORBELL_API const char *doorbell_version(void);

/* ------------------------------------------------------------------------------------------------ handles */

typedef struct doorbell_device doorbell_device; /* a GPU (or host threads) with the engine that executes queues */
typedef struct doorbell_pd doorbell_pd;         /* protection domain: keys of one do not open memory of another */
typedef struct doorbell_mem doorbell_mem;       /* memory that the device can read and write */
typedef struct doorbell_mr doorbell_mr;         /* a registered range of memory, with its key */
typedef struct doorbell_qp doorbell_qp;         /* a queue pair: send queue, completion queue, doorbell */
typedef struct doorbell_shm doorbell_shm;       /* a session with another process of this host */

/* ------------------------------------------------------------------------------------------------ device */

typedef struct doorbell_device_attr {
    size_t size;         /* sizeof(doorbell_device_attr) */
    const char *gpu;     /* "auto", "host", "cuda" or "cuda:N"; NULL: DOORBELL_GPU, else "auto" */
    uint32_t hca_cores;  /* engine threads, 1 to 64; 0: DOORBELL_HCA_CORES, else chosen from the machine */
    uint32_t flags;      /* DOORBELL_DEVICE_* */
    uint64_t quiesce_ns; /* how long destroying waits before it leaks; 0: DOORBELL_QUIESCE_MS, else 2 s */
} doorbell_device_attr;
#define DOORBELL_DEVICE_ATTR_INIT { sizeof(doorbell_device_attr), 0, 0, 0, 0 }

/* No engine thread: whoever waits runs the engine, with doorbell_device_poll and the waits of this header. */
#define DOORBELL_DEVICE_CALLER_DRIVEN 1u

typedef struct doorbell_device_info {
    size_t size;
    char name[128];          /* what the driver calls it, terminated */
    char pci_bus_id[32];     /* "" for host threads */
    int32_t is_cuda;         /* 1: a CUDA GPU, 0: host threads */
    int32_t ordinal;         /* CUDA ordinal, -1 for host threads */
    int32_t numa_node;       /* -1: not known */
    uint32_t sm_count;       /* multiprocessors, or CPU cores that may be used */
    uint32_t compute_major;  /* 0 for host threads */
    uint32_t compute_minor;
    uint32_t driver_version; /* CUDA's number, 12040 for 12.4; 0 for host threads */
    uint32_t hca_cores;      /* engine threads; 0: caller-driven */
} doorbell_device_info;

/* Opens a GPU and starts the engine. A CUDA device is used through its primary context, as the CUDA runtime and PyTorch do. */
DOORBELL_API doorbell_status doorbell_device_open(const doorbell_device_attr *attr, doorbell_device **out);
/* Takes the name away. The device ends when the last object made from it is gone. */
DOORBELL_API doorbell_status doorbell_device_close(doorbell_device *device);
DOORBELL_API doorbell_status doorbell_device_query(doorbell_device *device, doorbell_device_info *info);
/* One round of a caller-driven engine; *worked is set to 1 if there was work. Does nothing with engine threads. worked may be NULL. */
DOORBELL_API doorbell_status doorbell_device_poll(doorbell_device *device, int32_t *worked);

/* ------------------------------------------------------------------------------------------------ memory */

#define DOORBELL_MEM_DEVICE 0u /* GPU memory; host memory for host threads */
#define DOORBELL_MEM_PINNED 1u /* host memory that GPU and CPU read and write */

/* Zeroed memory. Freeing takes the name away; the memory goes when no MR uses it and no kernel that was running runs any more. */
DOORBELL_API doorbell_status doorbell_mem_alloc(doorbell_device *device, uint32_t kind, size_t length, doorbell_mem **out);
DOORBELL_API doorbell_status doorbell_mem_free(doorbell_mem *mem);
/* Where a kernel finds it, where the CPU finds it (NULL if it cannot), and its length. Each out pointer may be NULL. */
DOORBELL_API doorbell_status doorbell_mem_query(doorbell_mem *mem, uint64_t *device_address, void **host_pointer, size_t *length);
/* Copies from or to the CPU's memory; works for every kind, while kernels run. */
DOORBELL_API doorbell_status doorbell_mem_read(doorbell_mem *mem, size_t offset, void *to, size_t length);
DOORBELL_API doorbell_status doorbell_mem_write(doorbell_mem *mem, size_t offset, const void *from, size_t length);

/* ------------------------------------------------------------------------------------------------ registration */

DOORBELL_API doorbell_status doorbell_pd_alloc(doorbell_device *device, doorbell_pd **out);
DOORBELL_API doorbell_status doorbell_pd_free(doorbell_pd *pd);

#define DOORBELL_ACCESS_LOCAL_WRITE 1u   /* results of get and of atomics may be written here */
#define DOORBELL_ACCESS_REMOTE_WRITE 2u
#define DOORBELL_ACCESS_REMOTE_READ 4u
#define DOORBELL_ACCESS_REMOTE_ATOMIC 8u
#define DOORBELL_ACCESS_ALL 15u

#define DOORBELL_ADDRESS_BASED 0u /* work requests name virtual addresses (NVSHMEM, verbs) */
#define DOORBELL_ZERO_BASED 1u    /* work requests name offsets from the start of the region (NCCL) */

typedef struct doorbell_mr_info {
    size_t size;
    uint64_t address; /* what work requests name for its first byte */
    uint64_t length;
    uint32_t key;     /* local and remote key */
    uint32_t access;
} doorbell_mr_info;

/* Registers a range of memory that doorbell_mem_alloc gave. The region keeps the memory alive. */
DOORBELL_API doorbell_status doorbell_mr_register(doorbell_pd *pd, doorbell_mem *mem, size_t offset, size_t length, uint32_t access,
                                                  uint32_t addressing, doorbell_mr **out);
/* Registers memory of the caller: host memory, or GPU memory of the device's context (cudaMalloc, PyTorch). The caller keeps it mapped
 * until doorbell_mr_deregister has returned DOORBELL_OK. Such memory is reached over loopback only, not by another process. */
DOORBELL_API doorbell_status doorbell_mr_register_address(doorbell_pd *pd, uint64_t address, size_t length, int32_t is_device_memory,
                                                          uint32_t access, uint32_t addressing, doorbell_mr **out);
DOORBELL_API doorbell_status doorbell_mr_query(doorbell_mr *mr, doorbell_mr_info *info);
/* Revokes the key and waits until nothing can use the memory any more. After DOORBELL_ERR_TIMED_OUT the key is revoked, the region lives on, and
 * the call may be repeated. */
DOORBELL_API doorbell_status doorbell_mr_deregister(doorbell_mr *mr, uint64_t timeout_ns);

/* ------------------------------------------------------------------------------------------------ queue pairs */

#define DOORBELL_HANDLER_DEFAULT 0u
#define DOORBELL_HANDLER_PRODUCER 1u    /* a word in memory holds the producer index; the CPU rings: assisted */
#define DOORBELL_HANDLER_RECORD 2u      /* doorbell record, then doorbell */
#define DOORBELL_HANDLER_DOORBELL 10u   /* doorbell alone */

#define DOORBELL_CQ_DEFAULT 0u
#define DOORBELL_CQ_PER_SLOT 1u  /* a CQE for each slot: signalled one-slot requests only */
#define DOORBELL_CQ_COLLAPSED 2u /* one CQE, overwritten: every request */

typedef struct doorbell_qp_attr {
    size_t size;
    uint32_t depth;        /* 64-byte slots, a power of two up to 32768; 0: the default */
    uint32_t handler;      /* DOORBELL_HANDLER_* */
    uint32_t cq;           /* DOORBELL_CQ_* */
    uint32_t queue_memory; /* DOORBELL_MEM_PINNED + 1 or DOORBELL_MEM_DEVICE + 1; 0: the default */
} doorbell_qp_attr;
#define DOORBELL_QP_ATTR_INIT { sizeof(doorbell_qp_attr), 0, 0, 0, 0 }

/* What a kernel gets. The first pointer is a queue pair in DOCA GPUNetIO's layout, which NVIDIA's device headers take; the second is
 * Doorbell's extension. Both are addresses in memory that the GPU reads. */
#ifndef DOORBELL_QP_T
#define DOORBELL_QP_T
typedef struct doorbell_qp_t {
    void *qp;
    void *ext;
} doorbell_qp_t;
#endif

#define DOORBELL_QP_RESET 0u     /* made, or reset: connect it */
#define DOORBELL_QP_CONNECTED 1u
#define DOORBELL_QP_ERROR 2u     /* see doorbell_qp_error; reset and connect it again */
#define DOORBELL_QP_DESTROYED 3u

typedef struct doorbell_qp_info {
    size_t size;
    uint32_t number; /* 24 bits */
    uint32_t state;  /* DOORBELL_QP_* */
    uint32_t depth;
    uint32_t handler;
    uint64_t posted;    /* slots that were rung, as the engine saw them */
    uint64_t completed; /* slots that the engine completed */
    uint64_t errors;    /* error completions since creation, flushed ones left out */
} doorbell_qp_info;

typedef struct doorbell_qp_error_info {
    size_t size;
    uint32_t kind;      /* 0 none, 1 completion, 2 closed, 3 engine down */
    uint32_t syndrome;  /* mlx5's, ARCHITECTURE.md */
    uint32_t vendor;    /* Doorbell's, ARCHITECTURE.md */
    uint32_t wqe_index; /* modulo 2^16 */
    char text[240];     /* in words, terminated */
} doorbell_qp_error_info;

DOORBELL_API doorbell_status doorbell_qp_create(doorbell_pd *pd, const doorbell_qp_attr *attr, doorbell_qp **out);
/* Connects a queue pair to one of the same device; each side connects for itself, and a queue pair may be its own peer. */
DOORBELL_API doorbell_status doorbell_qp_connect_local(doorbell_qp *qp, doorbell_qp *peer);
/* Puts the queue pair where the GPU reads it. The handle is good until reset or destroy; each call gives the same. */
DOORBELL_API doorbell_status doorbell_qp_export(doorbell_qp *qp, doorbell_qp_t *out);
DOORBELL_API doorbell_status doorbell_qp_query(doorbell_qp *qp, doorbell_qp_info *info);
/* The first error since creation or reset; it does not change until then. DOORBELL_OK with kind 0 if there was none. */
DOORBELL_API doorbell_status doorbell_qp_error(doorbell_qp *qp, doorbell_qp_error_info *info);
/* Back to DOORBELL_QP_RESET with empty queues. No kernel may use it meanwhile. */
DOORBELL_API doorbell_status doorbell_qp_reset(doorbell_qp *qp, uint64_t timeout_ns);
/* Ends it: waiting kernels get an error. The memory goes when no running kernel can read it. */
DOORBELL_API doorbell_status doorbell_qp_destroy(doorbell_qp *qp, uint64_t timeout_ns);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_H */
