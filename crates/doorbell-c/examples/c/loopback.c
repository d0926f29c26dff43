/* Two queue pairs of one device, connected to each other. The CPU posts a put, a signal and a fetch-and-add, waits, and compares every byte; then it
 * provokes an error and reads what it was.
 *
 * With DOORBELL_GPU unset or "host" it needs nothing but a CPU. Exit status 0: everything was as it should be.
 */
#include <doorbell.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SECOND UINT64_C(1000000000)
enum { LENGTH = 4096, SIGNAL = 2 * LENGTH, RESULT = SIGNAL + 64, TOTAL = RESULT + 64 };

#define TRY(call)                                                                        \
    do {                                                                                 \
        if ((call) != DOORBELL_OK) {                                                     \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, doorbell_last_error());   \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)

#define CHECK(what)                                                                      \
    do {                                                                                 \
        if (!(what)) {                                                                   \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #what);           \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)

int main(void)
{
    doorbell_device *device;
    doorbell_device_info info = DOORBELL_DEVICE_INFO_INIT;
    TRY(doorbell_device_open(NULL, &device));
    TRY(doorbell_device_query(device, &info));
    printf("doorbell %s on %s, %" PRIu32 " engine thread(s)\n", doorbell_version(), info.name, info.hca_cores);

    /* Memory, and the right to use it. */
    doorbell_pd *pd;
    doorbell_mem *mem;
    doorbell_mr *mr;
    doorbell_mr_info region = DOORBELL_MR_INFO_INIT;
    TRY(doorbell_pd_alloc(device, &pd));
    TRY(doorbell_mem_alloc(device, DOORBELL_MEM_HOST, TOTAL, &mem));
    TRY(doorbell_mr_register(pd, mem, DOORBELL_ACCESS_ALL, DOORBELL_ADDRESS_BASED, &mr));
    TRY(doorbell_mr_query(mr, &region));

    /* Two queue pairs. */
    doorbell_qp_attr attr = DOORBELL_QP_ATTR_INIT;
    attr.depth = 64;
    doorbell_qp *a, *b;
    TRY(doorbell_qp_create(pd, &attr, &a));
    TRY(doorbell_qp_create(pd, &attr, &b));
    TRY(doorbell_qp_connect_local(a, b));
    TRY(doorbell_qp_connect_local(b, a));

    /* A put, a signal behind it, an atomic. */
    unsigned char sent[LENGTH], got[LENGTH];
    for (size_t i = 0; i < LENGTH; i++)
        sent[i] = (unsigned char)(i * 7 + 1);
    TRY(doorbell_mem_write(mem, 0, sent, LENGTH));
    uint64_t ticket;
    TRY(doorbell_cpu_put(a, region.address + LENGTH, region.key, region.address, region.key, LENGTH, SECOND, &ticket));
    TRY(doorbell_cpu_signal_add(a, region.address + SIGNAL, region.key, 5, SECOND, NULL));
    TRY(doorbell_cpu_fetch_add(a, region.address + SIGNAL, region.key, 2, region.address + RESULT, region.key, SECOND, &ticket));
    TRY(doorbell_cpu_wait(a, ticket, 5 * SECOND));

    uint64_t signal, before;
    TRY(doorbell_mem_read(mem, LENGTH, got, LENGTH));
    TRY(doorbell_mem_read(mem, SIGNAL, &signal, sizeof signal));
    TRY(doorbell_mem_read(mem, RESULT, &before, sizeof before));
    CHECK(memcmp(sent, got, LENGTH) == 0);
    CHECK(signal == 7);
    CHECK(before == 5);
    printf("%d bytes put, signal %" PRIu64 ", fetch-and-add found %" PRIu64 "\n", LENGTH, signal, before);

    /* A key that nobody gave out: the request fails, the queue pair says why, and it can be used again after a reset. */
    doorbell_status status = doorbell_cpu_put(a, region.address, region.key ^ 1, region.address, region.key, 8, SECOND, &ticket);
    if (status == DOORBELL_OK)
        status = doorbell_cpu_wait(a, ticket, 5 * SECOND);
    CHECK(status == DOORBELL_ERR_COMPLETION);
    doorbell_qp_error_info error = DOORBELL_QP_ERROR_INFO_INIT;
    TRY(doorbell_qp_error(a, &error));
    CHECK(error.kind == DOORBELL_ERROR_COMPLETION);
    printf("a wrong key: %s\n", error.text);
    TRY(doorbell_qp_reset(a, 5 * SECOND));
    TRY(doorbell_qp_connect_local(a, b));
    TRY(doorbell_cpu_put(a, region.address + LENGTH, region.key, region.address, region.key, 8, SECOND, &ticket));
    TRY(doorbell_cpu_wait(a, ticket, 5 * SECOND));

    TRY(doorbell_qp_destroy(a, 5 * SECOND));
    TRY(doorbell_qp_destroy(b, 5 * SECOND));
    CHECK(doorbell_qp_destroy(b, SECOND) == DOORBELL_ERR_HANDLE);
    TRY(doorbell_mr_deregister(mr, 5 * SECOND));
    TRY(doorbell_mem_free(mem));
    TRY(doorbell_pd_free(pd));
    TRY(doorbell_device_close(device));
    puts("ok");
    return 0;
}
