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
typedef struct doorbell_mr doorbell_mr;         /* registered memory, with its key */
typedef struct doorbell_qp doorbell_qp;         /* a queue pair: send queue, completion queue, doorbell */
typedef struct doorbell_listener doorbell_listener; /* waits for other processes of this host */
typedef struct doorbell_peer doorbell_peer;     /* a session with one of them */

/* ------------------------------------------------------------------------------------------------ device */

typedef struct doorbell_device_attr {
    size_t size;         /* sizeof(doorbell_device_attr) */
    const char *gpu;     /* "auto", "host", "cuda" or "cuda:N"; NULL: DOORBELL_GPU, else "auto" */
    uint32_t hca_cores;  /* engine threads, 1 to 64; 0: DOORBELL_HCA_CORES, else chosen from the machine */
    uint32_t flags;      /* DOORBELL_DEVICE_* */
    uint64_t quiesce_ns; /* how long destroying waits before it leaks; 0: DOORBELL_QUIESCE_MS, else 2 s */
    const char *fault;   /* faults that the engine plays: rules as in docs/faults.md, or "@FILE"; NULL: DOORBELL_FAULT, else none */
} doorbell_device_attr;
#define DOORBELL_DEVICE_ATTR_INIT { sizeof(doorbell_device_attr), 0, 0, 0, 0, 0 }

/* No engine thread: whoever waits runs the engine, with doorbell_device_poll and the waits of this header. */
#define DOORBELL_DEVICE_CALLER_DRIVEN 1u

typedef struct doorbell_device_info {
    size_t size;
    char name[128];         /* what the driver calls it, terminated */
    char pci_bus_id[32];    /* "" for host threads */
    int32_t is_cuda;        /* 1: a CUDA GPU, 0: host threads */
    int32_t ordinal;        /* CUDA ordinal, -1 for host threads */
    int32_t numa_node;      /* -1: not known */
    uint32_t sm_count;      /* multiprocessors, or CPU cores that may be used */
    uint32_t compute_major; /* 0 for host threads */
    uint32_t compute_minor;
    uint32_t driver_major;  /* the CUDA version that the driver implements; 0 for host threads */
    uint32_t driver_minor;
    uint32_t hca_cores;     /* engine threads; 0: caller-driven */
    uint32_t reserved;
} doorbell_device_info;
#define DOORBELL_DEVICE_INFO_INIT { sizeof(doorbell_device_info), { 0 }, { 0 }, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* Opens a GPU and starts the engine. A CUDA device is used through its primary context, as the CUDA runtime and PyTorch do. attr may be NULL. */
DOORBELL_API doorbell_status doorbell_device_open(const doorbell_device_attr *attr, doorbell_device **out);
/* Takes the name away. The device ends when the last object made from it is gone. */
DOORBELL_API doorbell_status doorbell_device_close(doorbell_device *device);
DOORBELL_API doorbell_status doorbell_device_query(doorbell_device *device, doorbell_device_info *info);
/* One round of a caller-driven engine; *worked is set to 1 if there was work, else 0. Does nothing with engine threads. worked may be NULL. */
DOORBELL_API doorbell_status doorbell_device_poll(doorbell_device *device, int32_t *worked);
/* Waits for the next thing that went wrong with any queue pair, engine thread or peer and describes it in text (terminated, cut at capacity).
 * DOORBELL_ERR_TIMED_OUT if nothing did. Each is reported once. */
DOORBELL_API doorbell_status doorbell_device_next_error(doorbell_device *device, char *text, size_t capacity, uint64_t timeout_ns);

/* ------------------------------------------------------------------------------------------------ memory */

#define DOORBELL_MEM_GPU 0u    /* GPU memory; host memory for host threads */
#define DOORBELL_MEM_HOST 1u   /* host memory that GPU and CPU read and write */
#define DOORBELL_MEM_SHARED 2u /* the same, and other processes of this host can map it once it is registered */

/* Zeroed memory. Freeing takes the name away; the memory goes when no region uses it and no kernel that was running runs any more. */
DOORBELL_API doorbell_status doorbell_mem_alloc(doorbell_device *device, uint32_t kind, size_t length, doorbell_mem **out);
/* Memory of the caller: host memory, which is pinned for the GPU, or (is_gpu = 1) GPU memory of the device's context (cudaMalloc, PyTorch).
 * The caller keeps it mapped until doorbell_mem_free and doorbell_mr_deregister of its regions have returned DOORBELL_OK. */
DOORBELL_API doorbell_status doorbell_mem_import(doorbell_device *device, uint64_t address, size_t length, int32_t is_gpu, doorbell_mem **out);
DOORBELL_API doorbell_status doorbell_mem_free(doorbell_mem *mem);
/* Where a kernel finds it, where the CPU finds it (NULL if it cannot), and its length. Each out pointer may be NULL. */
DOORBELL_API doorbell_status doorbell_mem_query(doorbell_mem *mem, uint64_t *device_address, void **host_pointer, size_t *length);
/* Copies to and from the CPU's memory, for every kind, also while kernels run; not for imported GPU memory. */
DOORBELL_API doorbell_status doorbell_mem_read(doorbell_mem *mem, size_t offset, void *to, size_t length);
DOORBELL_API doorbell_status doorbell_mem_write(doorbell_mem *mem, size_t offset, const void *from, size_t length);

/* ------------------------------------------------------------------------------------------------ registration */

DOORBELL_API doorbell_status doorbell_pd_alloc(doorbell_device *device, doorbell_pd **out);
DOORBELL_API doorbell_status doorbell_pd_free(doorbell_pd *pd);

#define DOORBELL_ACCESS_LOCAL_WRITE 1u /* results of get and of atomics may be written here */
#define DOORBELL_ACCESS_REMOTE_WRITE 2u
#define DOORBELL_ACCESS_REMOTE_READ 4u
#define DOORBELL_ACCESS_REMOTE_ATOMIC 8u
#define DOORBELL_ACCESS_ALL 15u

#define DOORBELL_ADDRESS_BASED 0u /* work requests name device addresses (NVSHMEM, verbs) */
#define DOORBELL_ZERO_BASED 1u    /* work requests name offsets from the start of the region (NCCL) */

typedef struct doorbell_mr_info {
    size_t size;
    uint64_t address; /* what work requests name for its first byte */
    uint64_t length;
    uint32_t key;     /* local and remote key */
    uint32_t access;
} doorbell_mr_info;
#define DOORBELL_MR_INFO_INIT { sizeof(doorbell_mr_info), 0, 0, 0, 0 }

/* Registers memory. The region keeps the memory alive. */
DOORBELL_API doorbell_status doorbell_mr_register(doorbell_pd *pd, doorbell_mem *mem, uint32_t access, uint32_t addressing, doorbell_mr **out);
DOORBELL_API doorbell_status doorbell_mr_query(doorbell_mr *mr, doorbell_mr_info *info);
/* Revokes the key and waits until nothing can use the memory through it. After any error but DOORBELL_ERR_HANDLE the key is revoked and the
 * name is gone, but the memory stays mapped for ever. */
DOORBELL_API doorbell_status doorbell_mr_deregister(doorbell_mr *mr, uint64_t timeout_ns);

/* ------------------------------------------------------------------------------------------------ queue pairs */

#define DOORBELL_HANDLER_DEFAULT 0u   /* DOORBELL_HANDLER, else doorbell and record */
#define DOORBELL_HANDLER_PRODUCER 1u  /* a word in memory holds the producer index */
#define DOORBELL_HANDLER_RECORD 2u    /* doorbell record, then doorbell */
#define DOORBELL_HANDLER_DOORBELL 10u /* doorbell alone */

#define DOORBELL_CQ_DEFAULT 0u   /* collapsed */
#define DOORBELL_CQ_PER_SLOT 1u  /* a CQE for each slot: signalled one-slot requests only */
#define DOORBELL_CQ_COLLAPSED 2u /* one CQE, overwritten: every request */

typedef struct doorbell_qp_attr {
    size_t size;        /* sizeof(doorbell_qp_attr) */
    uint32_t depth;     /* 64-byte slots, a power of two up to 32768; 0: DOORBELL_DEPTH, else 1024 */
    uint32_t handler;   /* DOORBELL_HANDLER_* */
    uint32_t cq;        /* DOORBELL_CQ_* */
    uint32_t companion; /* slots of a companion queue, for put_counter; 0: none */
    uint32_t receives;  /* receives of a receive queue, a power of two up to 32768; 0: no receive queue */
    uint32_t receive_pieces; /* pieces of memory that a kernel may give to a receive, a power of two up to 32; 0: 1 */
} doorbell_qp_attr;
#define DOORBELL_QP_ATTR_INIT { sizeof(doorbell_qp_attr), 0, 0, 0, 0, 0, 0 }

/* What a kernel gets. The first pointer is a queue pair in DOCA GPUNetIO's layout, which NVIDIA's device headers take; the second is
 * Doorbell's extension. Both are addresses in memory that the GPU reads. */
#ifndef DOORBELL_QP_T
#define DOORBELL_QP_T
typedef struct doorbell_qp_handle {
    void *qp;
    void *ext;
} doorbell_qp_t;
#endif

#define DOORBELL_QP_RESET 0u /* made, or reset: connect it */
#define DOORBELL_QP_READY 1u
#define DOORBELL_QP_ERROR 2u /* see doorbell_qp_error; reset and connect it again */
#define DOORBELL_QP_DESTROYED 3u

typedef struct doorbell_qp_info {
    size_t size;
    uint32_t number;      /* 24 bits */
    uint32_t state;       /* DOORBELL_QP_* */
    uint32_t depth;       /* slots */
    uint32_t handler;     /* DOORBELL_HANDLER_* */
    uint64_t doorbells;   /* rings, as the engine saw them, since creation */
    uint64_t slots_rung;  /* slots announced */
    uint64_t wqes;        /* work requests executed */
    uint64_t bytes;       /* payload moved */
    uint64_t flushed;     /* slots flushed in the error state */
} doorbell_qp_info;
#define DOORBELL_QP_INFO_INIT { sizeof(doorbell_qp_info), 0, 0, 0, 0, 0, 0, 0, 0, 0 }

#define DOORBELL_ERROR_NONE 0u
#define DOORBELL_ERROR_COMPLETION 1u  /* a work request completed in error */
#define DOORBELL_ERROR_CLOSED 2u      /* its owner closed or destroyed it */
#define DOORBELL_ERROR_ENGINE_DOWN 3u /* the engine that served it is gone */

typedef struct doorbell_qp_error_info {
    size_t size;
    uint32_t kind;      /* DOORBELL_ERROR_* */
    uint32_t syndrome;  /* mlx5's, see ARCHITECTURE.md */
    uint32_t vendor;    /* Doorbell's, see ARCHITECTURE.md */
    uint32_t wqe_index; /* modulo 2^16 */
    char text[400];     /* in words, terminated */
} doorbell_qp_error_info;
#define DOORBELL_QP_ERROR_INFO_INIT { sizeof(doorbell_qp_error_info), 0, 0, 0, 0, { 0 } }

/* attr may be NULL. */
DOORBELL_API doorbell_status doorbell_qp_create(doorbell_pd *pd, const doorbell_qp_attr *attr, doorbell_qp **out);
/* Connects a queue pair to one of the same device. Each side connects for itself, and a queue pair may be its own peer. */
DOORBELL_API doorbell_status doorbell_qp_connect_local(doorbell_qp *qp, doorbell_qp *peer);
/* Lets the queue pair receive what anybody's RoCE packets bring, as an Unreliable Connection that sends nothing (for sensors and other sources that only
 * know its number and a key). path_mtu is 256, 512, 1024, 2048 or 4096. Where packets have to be sent to is written to address, in words
 * ("192.0.2.1:4791", terminated, cut where capacity ends; 64 bytes suffice); address may be NULL. */
DOORBELL_API doorbell_status doorbell_qp_receive_from_anyone(doorbell_qp *qp, uint32_t path_mtu, char *address, size_t capacity);
/* Puts the queue pair where the GPU reads it. The handle is the same at each call and good until doorbell_qp_destroy; doorbell_qp_reset rewrites
 * what it points at. A queue pair is posted to by kernels or by doorbell_cpu_*, whichever comes first, not by both. */
DOORBELL_API doorbell_status doorbell_qp_export(doorbell_qp *qp, doorbell_qp_t *out);
DOORBELL_API doorbell_status doorbell_qp_query(doorbell_qp *qp, doorbell_qp_info *info);
/* The first error since creation or reset; it does not change until then. DOORBELL_OK and kind 0 if there was none. */
DOORBELL_API doorbell_status doorbell_qp_error(doorbell_qp *qp, doorbell_qp_error_info *info);
/* Back to DOORBELL_QP_RESET with empty queues. No kernel may use it meanwhile. */
DOORBELL_API doorbell_status doorbell_qp_reset(doorbell_qp *qp, uint64_t timeout_ns);
/* Ends it: kernels that wait get an error. The name is gone in any case; the memory goes when no running kernel can read it. */
DOORBELL_API doorbell_status doorbell_qp_destroy(doorbell_qp *qp, uint64_t timeout_ns);

/* ------------------------------------------------------------------------------------------------ other processes of this host */

/* address: a path for a Unix socket, or "@name" in Linux's abstract name space. Only processes of the same user are let in. */
DOORBELL_API doorbell_status doorbell_listen(doorbell_device *device, const char *address, doorbell_listener **out);
DOORBELL_API doorbell_status doorbell_listener_close(doorbell_listener *listener);
/* The next process that dialled. */
DOORBELL_API doorbell_status doorbell_accept(doorbell_listener *listener, uint64_t timeout_ns, doorbell_peer **out);
/* Waits for the listener to appear and connects to it. */
DOORBELL_API doorbell_status doorbell_dial(doorbell_device *device, const char *address, uint64_t timeout_ns, doorbell_peer **out);
/* Both sides call it, give bytes and get the other's: into theirs, of which *their_length says how many. DOORBELL_ERR_INVALID if capacity is too
 * small; the bytes are lost then. With nothing to give on both sides it is a barrier. */
DOORBELL_API doorbell_status doorbell_peer_exchange(doorbell_peer *peer, const void *mine, size_t length, void *theirs, size_t capacity,
                                                    size_t *their_length, uint64_t timeout_ns);
/* Ends the session in an orderly way. The name is gone in any case; queue pairs connected over it keep it alive. */
DOORBELL_API doorbell_status doorbell_peer_close(doorbell_peer *peer, uint64_t timeout_ns);

typedef struct doorbell_remote_mr {
    uint64_t address; /* what work requests name for its first byte */
    uint64_t length;
    uint32_t key;
    uint32_t reserved;
} doorbell_remote_mr;

/* Bytes of a description with n regions. */
#define DOORBELL_ENDPOINT_SIZE(n) (24u + 24u * (n))

/* Describes the queue pair, and memory that the peer may use, in bytes to be sent to the peer. */
DOORBELL_API doorbell_status doorbell_qp_describe(doorbell_qp *qp, doorbell_mr *const *regions, size_t count, void *endpoint, size_t capacity,
                                                  size_t *length);
/* Connects to the queue pair that the peer described, and tells its memory: up to capacity regions, of which *count says how many there are. regions and
 * count may be NULL. */
DOORBELL_API doorbell_status doorbell_qp_connect_peer(doorbell_qp *qp, doorbell_peer *peer, const void *endpoint, size_t length,
                                                      doorbell_remote_mr *regions, size_t capacity, size_t *count);

/* ------------------------------------------------------------------------------------------------ posting from the CPU */

/* The same protocol, run by the calling thread; calls on one queue pair take turns. A ticket names a posted request. timeout_ns bounds the
 * wait for room in the queue. A request that fails puts the queue pair into error: DOORBELL_ERR_COMPLETION, here and at every later call. */
DOORBELL_API doorbell_status doorbell_cpu_put(doorbell_qp *qp, uint64_t remote_address, uint32_t remote_key, uint64_t local_address, uint32_t local_key,
                                              uint64_t length, uint64_t timeout_ns, uint64_t *ticket);
DOORBELL_API doorbell_status doorbell_cpu_get(doorbell_qp *qp, uint64_t remote_address, uint32_t remote_key, uint64_t local_address, uint32_t local_key,
                                              uint64_t length, uint64_t timeout_ns, uint64_t *ticket);
/* Adds to a 64-bit word of the target; the sum is visible only after the puts before it on this queue pair. */
DOORBELL_API doorbell_status doorbell_cpu_signal_add(doorbell_qp *qp, uint64_t remote_address, uint32_t remote_key, uint64_t add, uint64_t timeout_ns,
                                                     uint64_t *ticket);
/* The same, and the old value goes to a local word. */
DOORBELL_API doorbell_status doorbell_cpu_fetch_add(doorbell_qp *qp, uint64_t remote_address, uint32_t remote_key, uint64_t add, uint64_t result_address,
                                                    uint32_t result_key, uint64_t timeout_ns, uint64_t *ticket);
DOORBELL_API doorbell_status doorbell_cpu_compare_swap(doorbell_qp *qp, uint64_t remote_address, uint32_t remote_key, uint64_t compare, uint64_t swap,
                                                       uint64_t result_address, uint32_t result_key, uint64_t timeout_ns, uint64_t *ticket);
/* Waits until the request is complete: what it wrote is visible at its target, what it fetched is visible here. */
DOORBELL_API doorbell_status doorbell_cpu_wait(doorbell_qp *qp, uint64_t ticket, uint64_t timeout_ns);

/* Messages: what is sent takes a receive of the peer, which must have a receive queue. SEND goes to queue pairs of the same device (and, for Rust programs,
 * over RoCE); between processes over shared memory only doorbell_cpu_write_imm does, and SEND fails (DOORBELL_ERR_COMPLETION). */
DOORBELL_API doorbell_status doorbell_cpu_send(doorbell_qp *qp, uint64_t local_address, uint32_t local_key, uint64_t length, uint64_t timeout_ns,
                                               uint64_t *ticket);
DOORBELL_API doorbell_status doorbell_cpu_send_imm(doorbell_qp *qp, uint64_t local_address, uint32_t local_key, uint64_t length, uint32_t immediate,
                                                   uint64_t timeout_ns, uint64_t *ticket);
/* A put whose end takes a receive, which gets the immediate; the receive's own memory is not used. */
DOORBELL_API doorbell_status doorbell_cpu_write_imm(doorbell_qp *qp, uint64_t remote_address, uint32_t remote_key, uint64_t local_address,
                                                    uint32_t local_key, uint64_t length, uint32_t immediate, uint64_t timeout_ns, uint64_t *ticket);

#define DOORBELL_ARRIVAL_WRITE_IMM 1u
#define DOORBELL_ARRIVAL_SEND 2u
#define DOORBELL_ARRIVAL_SEND_IMM 3u

typedef struct doorbell_message {
    size_t size;
    uint32_t arrival;   /* DOORBELL_ARRIVAL_* */
    uint32_t length;    /* bytes */
    uint32_t immediate; /* in host order; 0 for DOORBELL_ARRIVAL_SEND */
    uint32_t reserved;
} doorbell_message;
#define DOORBELL_MESSAGE_INIT { sizeof(doorbell_message), 0, 0, 0, 0 }

/* Posts a receive for a message of at most length bytes (0: for messages without bytes). timeout_ns bounds the wait for one of those posted before to
 * be taken, if the queue is full. */
DOORBELL_API doorbell_status doorbell_cpu_recv_post(doorbell_qp *qp, uint64_t local_address, uint32_t local_key, uint64_t length, uint64_t timeout_ns,
                                                    uint64_t *ticket);
/* Waits for the message that takes the receive: its bytes are visible here then. Take it before as many receives as the queue has are posted after it. */
DOORBELL_API doorbell_status doorbell_cpu_recv_wait(doorbell_qp *qp, uint64_t ticket, uint64_t timeout_ns, doorbell_message *message);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_H */
