/*
 * Doorbell's device functions for CUDA C and C++: put, get, signal, atomics, send, receive, wait, flush, called by a GPU thread.
 *
 * They are in the shipped PTX (ptx/doorbell_device.ptx). `nvcc -arch=sm_90 -dc doorbell_device.ptx -o doorbell_device.o` makes an
 * object of it, which nvcc links with yours (compiled with -dc); or hand the PTX and your cubin to cuLinkAddData at run time. The
 * queue handles come from the host library (doorbell.h), which exports a QP to the GPU.
 *
 * Every function is called by one thread for itself; lanes of a warp that call together with the same QP are served together (one
 * reservation, one ring). For one operation by a warp or a block: __syncwarp() or __syncthreads(), then one thread calls.
 *
 * Addresses are what the key's region says: offsets from its start, or virtual addresses. Keys are in host byte order. Times are
 * nanoseconds from the call on. A result of 0 is success; otherwise see DOORBELL_E_* below.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef DOORBELL_DEVICE_H
#define DOORBELL_DEVICE_H

#include <stdint.h>

/* A compiler for the host alone may read the declarations; only GPU code can call the functions. */
#if !defined(__CUDACC__)
#define DOORBELL_DEVICE_API extern
#elif defined(__cplusplus)
#define DOORBELL_DEVICE_API extern "C" __device__
#else
#define DOORBELL_DEVICE_API extern __device__
#endif

/* A queue pair, as the host library exports it (doorbell.h has the same). `ext` is null for a bare DOCA queue pair. */
#ifndef DOORBELL_QP_T
#define DOORBELL_QP_T
typedef struct doorbell_qp_handle {
    void *qp;
    void *ext;
} doorbell_qp_t;
#endif

/* Flags. Without DOORBELL_EXCLUSIVE or DOORBELL_BLOCK any threads of the GPU may share the QP. */
enum {
    DOORBELL_EXCLUSIVE = 1,      /* one thread at a time uses the QP */
    DOORBELL_BLOCK = 2,          /* threads of one block use the QP */
    DOORBELL_NO_RING = 4,        /* leave the ringing to a later call, or to db_ring */
    DOORBELL_NO_SPACE_CHECK = 8, /* the caller knows that the ring has room */
    DOORBELL_SIGNAL_LAST = 16    /* one completion for all that this call posts (collapsed CQs only) */
};

/* A result: the kind in bits 0 to 7; for DOORBELL_E_COMPLETION also the mlx5 syndrome in bits 8 to 15, the vendor syndrome in 16 to
 * 23 and the WQE's index in 32 to 47. */
#ifndef DOORBELL_OK
#define DOORBELL_OK 0
#endif
enum {
    DOORBELL_E_COMPLETION = 1,  /* a WQE of this QP completed in error: the first one, whichever call reports it */
    DOORBELL_E_TIMED_OUT = 2,   /* the operation may still complete */
    DOORBELL_E_QP = 3,          /* the QP is in error */
    DOORBELL_E_CLOSED = 4,      /* the host closed the QP */
    DOORBELL_E_ENGINE_DOWN = 5, /* the engine that executes the QP is gone */
    DOORBELL_E_NO_SPACE = 6,    /* the ring stayed full; nothing was posted */
    DOORBELL_E_INVALID = 7,     /* the QP cannot take such a request */
    DOORBELL_E_STUCK = 8,       /* an earlier thread never published its WQEs; reset the QP */
    DOORBELL_E_LAPPED = 10      /* the receive's completion was overwritten by a later one */
};

/* Posting. Each stores the operation's ticket in *ticket unless it is null, and does not wait for the operation; it waits for room in
 * the ring, at most timeout_ns. */

/* Writes len bytes of local memory to remote memory. Longer than 1 GiB: several WQEs. */
DOORBELL_DEVICE_API uint64_t db_put(doorbell_qp_t q, uint64_t raddr, uint32_t rkey, uint64_t laddr, uint32_t lkey,
                                    uint64_t len, uint32_t flags, uint64_t timeout_ns, uint64_t *ticket);
/* Writes the low len bytes (1, 2, 4, 8) of value. */
DOORBELL_DEVICE_API uint64_t db_put_value(doorbell_qp_t q, uint64_t raddr, uint32_t rkey, uint64_t value, uint32_t len,
                                          uint32_t flags, uint64_t timeout_ns, uint64_t *ticket);
/* db_put, then adds to the 64-bit word at saddr; the addition becomes visible after the data. */
DOORBELL_DEVICE_API uint64_t db_put_signal(doorbell_qp_t q, uint64_t raddr, uint32_t rkey, uint64_t laddr, uint32_t lkey,
                                           uint64_t len, uint64_t saddr, uint32_t skey, uint64_t add, uint32_t flags,
                                           uint64_t timeout_ns, uint64_t *ticket);
/* db_put, and when it has completed, adds to the counter at caddr through the companion QP (per-slot CQs only). */
DOORBELL_DEVICE_API uint64_t db_put_counter(doorbell_qp_t q, uint64_t raddr, uint32_t rkey, uint64_t laddr, uint32_t lkey,
                                            uint64_t len, uint64_t caddr, uint32_t ckey, uint64_t add, uint32_t flags,
                                            uint64_t timeout_ns, uint64_t *ticket);
/* Reads len bytes of remote memory into local memory. */
DOORBELL_DEVICE_API uint64_t db_get(doorbell_qp_t q, uint64_t raddr, uint32_t rkey, uint64_t laddr, uint32_t lkey,
                                    uint64_t len, uint32_t flags, uint64_t timeout_ns, uint64_t *ticket);
/* db_get and a DUMP: complete only when the data is visible to this GPU, whatever the NIC. */
DOORBELL_DEVICE_API uint64_t db_get_visible(doorbell_qp_t q, uint64_t raddr, uint32_t rkey, uint64_t laddr,
                                            uint32_t lkey, uint64_t len, uint32_t flags, uint64_t timeout_ns,
                                            uint64_t *ticket);
/* Adds to the 64-bit word at saddr, after all earlier puts of this QP are visible. */
DOORBELL_DEVICE_API uint64_t db_signal_add(doorbell_qp_t q, uint64_t saddr, uint32_t skey, uint64_t add, uint32_t flags,
                                           uint64_t timeout_ns, uint64_t *ticket);
/* 64-bit atomics; the old value goes to laddr, in host order. */
DOORBELL_DEVICE_API uint64_t db_fetch_add(doorbell_qp_t q, uint64_t raddr, uint32_t rkey, uint64_t add, uint64_t laddr,
                                          uint32_t lkey, uint32_t flags, uint64_t timeout_ns, uint64_t *ticket);
DOORBELL_DEVICE_API uint64_t db_compare_swap(doorbell_qp_t q, uint64_t raddr, uint32_t rkey, uint64_t compare,
                                             uint64_t swap, uint64_t laddr, uint32_t lkey, uint32_t flags,
                                             uint64_t timeout_ns, uint64_t *ticket);
/* Carries stop after each bit set in boundary. */
DOORBELL_DEVICE_API uint64_t db_masked_fetch_add(doorbell_qp_t q, uint64_t raddr, uint32_t rkey, uint64_t add,
                                                 uint64_t boundary, uint64_t laddr, uint32_t lkey, uint32_t flags,
                                                 uint64_t timeout_ns, uint64_t *ticket);
/* Compares the bits of compare_mask and stores those of swap_mask (collapsed CQs only). */
DOORBELL_DEVICE_API uint64_t db_masked_compare_swap(doorbell_qp_t q, uint64_t raddr, uint32_t rkey, uint64_t compare,
                                                    uint64_t compare_mask, uint64_t swap, uint64_t swap_mask,
                                                    uint64_t laddr, uint32_t lkey, uint32_t flags, uint64_t timeout_ns,
                                                    uint64_t *ticket);
/* 32-bit atomics; the old value goes to laddr BIG-ENDIAN, as hardware delivers it. */
DOORBELL_DEVICE_API uint64_t db_fetch_add32(doorbell_qp_t q, uint64_t raddr, uint32_t rkey, uint32_t add, uint64_t laddr,
                                            uint32_t lkey, uint32_t flags, uint64_t timeout_ns, uint64_t *ticket);
DOORBELL_DEVICE_API uint64_t db_compare_swap32(doorbell_qp_t q, uint64_t raddr, uint32_t rkey, uint32_t compare,
                                               uint32_t swap, uint64_t laddr, uint32_t lkey, uint32_t flags,
                                               uint64_t timeout_ns, uint64_t *ticket);
/* A WQE that does nothing but complete in its turn. */
DOORBELL_DEVICE_API uint64_t db_nop(doorbell_qp_t q, uint32_t flags, uint64_t timeout_ns, uint64_t *ticket);
/* Rings for what was posted with DOORBELL_NO_RING. *ticket, if given, becomes 0. */
DOORBELL_DEVICE_API uint64_t db_ring(doorbell_qp_t q, uint32_t flags, uint64_t timeout_ns, uint64_t *ticket);

/* Messages: each takes a receive of the peer. Without one there the operation waits for a bounded time, and then fails. */

/* db_put, and an immediate: consumes a receive of the peer, whose own memory it leaves alone. */
DOORBELL_DEVICE_API uint64_t db_write_imm(doorbell_qp_t q, uint64_t raddr, uint32_t rkey, uint64_t laddr, uint32_t lkey,
                                          uint64_t len, uint32_t imm, uint32_t flags, uint64_t timeout_ns,
                                          uint64_t *ticket);
/* Sends len bytes (0 to 1 GiB) of local memory into the memory of the peer's next receive. */
DOORBELL_DEVICE_API uint64_t db_send(doorbell_qp_t q, uint64_t laddr, uint32_t lkey, uint64_t len, uint32_t flags,
                                     uint64_t timeout_ns, uint64_t *ticket);
DOORBELL_DEVICE_API uint64_t db_send_imm(doorbell_qp_t q, uint64_t laddr, uint32_t lkey, uint64_t len, uint32_t imm,
                                         uint32_t flags, uint64_t timeout_ns, uint64_t *ticket);
/* Sends len bytes (at most 44) that bytes points to; they travel inside the request, and need not be registered. */
DOORBELL_DEVICE_API uint64_t db_send_inline(doorbell_qp_t q, const void *bytes, uint32_t len, uint32_t flags,
                                            uint64_t timeout_ns, uint64_t *ticket);
DOORBELL_DEVICE_API uint64_t db_send_inline_imm(doorbell_qp_t q, const void *bytes, uint32_t len, uint32_t imm,
                                                uint32_t flags, uint64_t timeout_ns, uint64_t *ticket);

/* Receiving, with a QP that was made with a receive queue. Receives are numbered from 0 by their tickets, and are filled in that order. */

/* How a message came. */
#ifndef DOORBELL_ARRIVAL_SEND
#define DOORBELL_ARRIVAL_WRITE_IMM 1u
#define DOORBELL_ARRIVAL_SEND 2u
#define DOORBELL_ARRIVAL_SEND_IMM 3u
#endif
typedef struct doorbell_received {
    uint64_t ticket;   /* of its receive */
    uint32_t arrival;  /* DOORBELL_ARRIVAL_*; 0: none has come yet (db_recv_poll) */
    uint32_t bytes;    /* of the message */
    uint32_t imm;      /* its immediate; 0 without one */
    uint32_t reserved;
} doorbell_received;

/* Posts a receive for a message of at most len bytes; of 0, for messages without bytes and for db_write_imm. */
DOORBELL_DEVICE_API uint64_t db_recv_post(doorbell_qp_t q, uint64_t laddr, uint32_t lkey, uint64_t len, uint32_t flags,
                                          uint64_t timeout_ns, uint64_t *ticket);
/* Posts the next n receives with the memory that they had a lap ago. The ticket is the last one's. */
DOORBELL_DEVICE_API uint64_t db_recv_repost(doorbell_qp_t q, uint32_t n, uint32_t flags, uint64_t timeout_ns,
                                            uint64_t *ticket);
/* Looks once whether a message has taken the receive with ticket which. */
DOORBELL_DEVICE_API uint64_t db_recv_poll(doorbell_qp_t q, uint64_t which, doorbell_received *received);
/* Waits for it, at most timeout_ns; its bytes are visible to the caller then. Take what it says before the receive's slot is posted again. */
DOORBELL_DEVICE_API uint64_t db_recv_wait(doorbell_qp_t q, uint64_t which, uint64_t timeout_ns, doorbell_received *received);

/* Waiting, at most timeout_ns. */

/* Rings if needed, then waits for everything posted so far. */
DOORBELL_DEVICE_API uint64_t db_flush(doorbell_qp_t q, uint32_t flags, uint64_t timeout_ns, uint64_t *ticket);
/* Waits for the operation with ticket which. */
DOORBELL_DEVICE_API uint64_t db_wait(doorbell_qp_t q, uint64_t which, uint32_t flags, uint64_t timeout_ns,
                                     uint64_t *ticket);
/* Looks once: *ticket becomes 1 if the operation with ticket which is complete, else 0. */
DOORBELL_DEVICE_API uint64_t db_poll(doorbell_qp_t q, uint64_t which, uint32_t flags, uint64_t timeout_ns,
                                     uint64_t *ticket);
/* Waits until the 64-bit word at `at`, counting up, reaches value; what was written before it is visible then. */
DOORBELL_DEVICE_API uint64_t db_wait_signal(const uint64_t *at, uint64_t value, uint64_t timeout_ns);

#endif
