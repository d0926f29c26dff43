/* Two processes of one host: the child puts into memory of the parent over the shared memory link, and raises a signal behind the data. The parent
 * waits for the signal and compares every byte.
 *
 * The child is started with exec, since neither threads nor a GPU's context survive a fork.
 */
#include <doorbell.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SECOND UINT64_C(1000000000)
#define LIMIT (20 * SECOND)
enum { LENGTH = 1 << 20, SIGNAL = LENGTH, TOTAL = LENGTH + 64 };

#define TRY(call)                                                                                      \
    do {                                                                                               \
        if ((call) != DOORBELL_OK) {                                                                   \
            fprintf(stderr, "%s, line %d: %s\n", who, __LINE__, doorbell_last_error());                \
            exit(1);                                                                                   \
        }                                                                                              \
    } while (0)

static unsigned char pattern(size_t i) { return (unsigned char)(i * 31 + (i >> 8) + 3); }

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

/* One side: opens, registers, connects to the other side over the session, then does its part. */
static int side(const char *who, const char *address, int listening)
{
    doorbell_device *device;
    doorbell_pd *pd;
    doorbell_mem *mem;
    doorbell_mr *mr;
    doorbell_qp *qp;
    doorbell_peer *peer;
    doorbell_listener *listener = NULL;
    doorbell_mr_info mine = DOORBELL_MR_INFO_INIT;

    TRY(doorbell_device_open(NULL, &device));
    TRY(doorbell_pd_alloc(device, &pd));
    TRY(doorbell_mem_alloc(device, DOORBELL_MEM_SHARED, TOTAL, &mem));
    TRY(doorbell_mr_register(pd, mem, DOORBELL_ACCESS_ALL, DOORBELL_ZERO_BASED, &mr));
    TRY(doorbell_mr_query(mr, &mine));
    TRY(doorbell_qp_create(pd, NULL, &qp));

    if (listening) {
        TRY(doorbell_listen(device, address, &listener));
        pid_t child = fork();
        if (child == 0) {
            execl("/proc/self/exe", "peers", address, (char *)NULL);
            _exit(127);
        }
        TRY(doorbell_accept(listener, LIMIT, &peer));
    } else {
        TRY(doorbell_dial(device, address, LIMIT, &peer));
    }

    /* Descriptions cross over the session itself. */
    unsigned char description[DOORBELL_ENDPOINT_SIZE(1)], theirs[DOORBELL_ENDPOINT_SIZE(1)];
    size_t length, their_length, count;
    doorbell_mr *offered[] = { mr };
    doorbell_remote_mr remote;
    TRY(doorbell_qp_describe(qp, offered, 1, description, sizeof description, &length));
    TRY(doorbell_peer_exchange(peer, description, length, theirs, sizeof theirs, &their_length, LIMIT));
    TRY(doorbell_qp_connect_peer(qp, peer, theirs, their_length, &remote, 1, &count));
    TRY(doorbell_peer_exchange(peer, NULL, 0, NULL, 0, NULL, LIMIT));

    if (listening) {
        uint64_t signal = 0, limit = now_ns() + LIMIT;
        void *host;
        TRY(doorbell_mem_query(mem, NULL, &host, NULL));
        do {
            TRY(doorbell_device_poll(device, NULL));
            signal = __atomic_load_n((uint64_t *)((char *)host + SIGNAL), __ATOMIC_ACQUIRE);
        } while (signal == 0 && now_ns() < limit);
        if (signal != 42) {
            fprintf(stderr, "the signal is %" PRIu64 " after %d s\n", signal, (int)(LIMIT / SECOND));
            return 1;
        }
        for (size_t i = 0; i < LENGTH; i++) {
            if (((unsigned char *)host)[i] != pattern(i)) {
                fprintf(stderr, "byte %zu is wrong\n", i);
                return 1;
            }
        }
        printf("%s: %d bytes and the signal behind them are here\n", who, LENGTH);
    } else {
        unsigned char *bytes = malloc(LENGTH);
        for (size_t i = 0; i < LENGTH; i++)
            bytes[i] = pattern(i);
        TRY(doorbell_mem_write(mem, 0, bytes, LENGTH));
        free(bytes);
        uint64_t ticket;
        TRY(doorbell_cpu_put(qp, remote.address, remote.key, mine.address, mine.key, LENGTH, LIMIT, NULL));
        TRY(doorbell_cpu_signal_add(qp, remote.address + SIGNAL, remote.key, 42, LIMIT, &ticket));
        TRY(doorbell_cpu_wait(qp, ticket, LIMIT));
        printf("%s: put, signalled, completed\n", who);
    }

    /* Both are done with each other's memory before either lets go. */
    fflush(stdout);
    TRY(doorbell_peer_exchange(peer, NULL, 0, NULL, 0, NULL, LIMIT));
    TRY(doorbell_qp_destroy(qp, LIMIT));
    TRY(doorbell_mr_deregister(mr, LIMIT));
    TRY(doorbell_mem_free(mem));
    TRY(doorbell_pd_free(pd));
    TRY(doorbell_device_close(device));
    if (listening) {
        TRY(doorbell_listener_close(listener));
        int status;
        while (wait(&status) < 0 && errno == EINTR) { }
        if (status != 0) {
            fprintf(stderr, "the child ended with status %d\n", status);
            return 1;
        }
        puts("ok");
    }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 1)
        return side("child", argv[1], 0);
    char address[64];
    snprintf(address, sizeof address, "@doorbell-peers-%ld", (long)getpid());
    return side("parent", address, 1);
}
