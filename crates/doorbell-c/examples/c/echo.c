/* Two queue pairs of one device, connected to each other. One sends messages, the other receives them and sends each back with its immediate; every
 * byte is compared. Then a message that is longer than its receive: both ends say so.
 *
 * With DOORBELL_GPU unset or "host" it needs nothing but a CPU. Exit status 0: everything was as it should be.
 */
#include <doorbell.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SECOND UINT64_C(1000000000)
enum { LENGTH = 1024, THERE = LENGTH, BACK = 2 * LENGTH, TOTAL = 3 * LENGTH, ROUNDS = 1000 };

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
    doorbell_pd *pd;
    doorbell_mem *mem;
    doorbell_mr *mr;
    doorbell_mr_info region = DOORBELL_MR_INFO_INIT;
    TRY(doorbell_device_open(NULL, &device));
    TRY(doorbell_pd_alloc(device, &pd));
    TRY(doorbell_mem_alloc(device, DOORBELL_MEM_HOST, TOTAL, &mem));
    TRY(doorbell_mr_register(pd, mem, DOORBELL_ACCESS_ALL, DOORBELL_ADDRESS_BASED, &mr));
    TRY(doorbell_mr_query(mr, &region));

    /* Two queue pairs with receive queues. */
    doorbell_qp_attr attr = DOORBELL_QP_ATTR_INIT;
    attr.depth = 64;
    attr.receives = 4;
    doorbell_qp *a, *b;
    TRY(doorbell_qp_create(pd, &attr, &a));
    TRY(doorbell_qp_create(pd, &attr, &b));
    TRY(doorbell_qp_connect_local(a, b));
    TRY(doorbell_qp_connect_local(b, a));

    /* There and back. Receives are posted before the messages that take them. */
    unsigned char sent[LENGTH], got[LENGTH];
    doorbell_message message = DOORBELL_MESSAGE_INIT;
    uint64_t there, back;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint32_t length = 1 + round * 37 % LENGTH;
        for (uint32_t i = 0; i < length; i++)
            sent[i] = (unsigned char)(i * 7 + round);
        TRY(doorbell_mem_write(mem, 0, sent, length));
        TRY(doorbell_cpu_recv_post(b, region.address + THERE, region.key, LENGTH, SECOND, &there));
        TRY(doorbell_cpu_recv_post(a, region.address + BACK, region.key, LENGTH, SECOND, &back));
        TRY(doorbell_cpu_send_imm(a, region.address, region.key, length, round, SECOND, NULL));
        TRY(doorbell_cpu_recv_wait(b, there, 5 * SECOND, &message));
        CHECK(message.arrival == DOORBELL_ARRIVAL_SEND_IMM && message.length == length && message.immediate == round);
        TRY(doorbell_cpu_send_imm(b, region.address + THERE, region.key, message.length, message.immediate, SECOND, NULL));
        TRY(doorbell_cpu_recv_wait(a, back, 5 * SECOND, &message));
        CHECK(message.length == length && message.immediate == round);
        TRY(doorbell_mem_read(mem, BACK, got, length));
        CHECK(memcmp(sent, got, length) == 0);
    }
    printf("%d messages there and back\n", ROUNDS);

    /* A put that announces itself. */
    TRY(doorbell_cpu_recv_post(b, 0, 0, 0, SECOND, &there));
    TRY(doorbell_cpu_write_imm(a, region.address + THERE, region.key, region.address, region.key, 8, 7, SECOND, NULL));
    TRY(doorbell_cpu_recv_wait(b, there, 5 * SECOND, &message));
    CHECK(message.arrival == DOORBELL_ARRIVAL_WRITE_IMM && message.length == 8 && message.immediate == 7);

    /* A message longer than its receive. */
    uint64_t ticket;
    TRY(doorbell_cpu_recv_post(b, region.address + THERE, region.key, 8, SECOND, &there));
    TRY(doorbell_cpu_send(a, region.address, region.key, 9, SECOND, &ticket));
    CHECK(doorbell_cpu_wait(a, ticket, 5 * SECOND) == DOORBELL_ERR_COMPLETION);
    CHECK(doorbell_cpu_recv_wait(b, there, 5 * SECOND, &message) == DOORBELL_ERR_COMPLETION);
    printf("too long a message: %s\n", doorbell_last_error());

    TRY(doorbell_qp_destroy(a, 5 * SECOND));
    TRY(doorbell_qp_destroy(b, 5 * SECOND));
    TRY(doorbell_mr_deregister(mr, 5 * SECOND));
    TRY(doorbell_mem_free(mem));
    TRY(doorbell_pd_free(pd));
    TRY(doorbell_device_close(device));
    puts("ok");
    return 0;
}
