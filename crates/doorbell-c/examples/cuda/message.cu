// CUDA C++ that sends and receives on Doorbell's queues: one block asks, the other answers, each with a queue pair of its own. Questions
// travel inside the requests; answers come from registered memory into the memory of a receive, and are checked there byte by byte.
//
// Exit status 0: all as it should be; 77: there is no CUDA GPU here.
#include <cuda_runtime.h>
#include <doorbell.h>
#include <doorbell_device.h>

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr uint64_t SECOND = 1000000000;
constexpr uint32_t RECEIVES = 16, ANSWER = 256, ROUNDS = 1000;
constexpr size_t BYTES = 2 * RECEIVES * ANSWER;

void doorbell_or_die(doorbell_status status, const char *what, int line)
{
    if (status != DOORBELL_OK) {
        std::fprintf(stderr, "line %d: %s: %s\n", line, what, doorbell_last_error());
        std::exit(1);
    }
}
void cuda_or_die(cudaError_t status, const char *what, int line)
{
    if (status != cudaSuccess) {
        std::fprintf(stderr, "line %d: %s: %s\n", line, what, cudaGetErrorString(status));
        std::exit(1);
    }
}
#define DB(call) doorbell_or_die((call), #call, __LINE__)
#define CU(call) cuda_or_die((call), #call, __LINE__)

struct Talk {
    doorbell_qp_t asks, answers;
    // Host memory, which the GPU reads and writes: answers as they are received, and as they are sent.
    volatile unsigned char *memory;
    uint64_t address;
    uint32_t key;
    uint64_t *errors; // of either block: 0, or the first error
};

__device__ unsigned char answer_byte(uint64_t question, uint32_t i)
{
    return static_cast<unsigned char>(question * 7 + i);
}

__device__ uint64_t ask(const Talk &talk)
{
    uint64_t ticket = 0;
    for (uint64_t n = 0; n < ROUNDS; n++) {
        const uint32_t place = n % RECEIVES * ANSWER;
        uint64_t error = db_recv_post(talk.asks, talk.address + place, talk.key, ANSWER, DOORBELL_EXCLUSIVE, SECOND, &ticket);
        if (error == 0)
            error = db_send_inline_imm(talk.asks, &n, sizeof n, uint32_t(n), DOORBELL_EXCLUSIVE, SECOND, nullptr);
        doorbell_received got = {};
        if (error == 0)
            error = db_recv_wait(talk.asks, ticket, 5 * SECOND, &got);
        if (error != 0)
            return error;
        if (got.arrival != DOORBELL_ARRIVAL_SEND || got.bytes != ANSWER)
            return UINT64_MAX;
        for (uint32_t i = 0; i < ANSWER; i++)
            if (talk.memory[place + i] != answer_byte(n, i))
                return UINT64_MAX - 1;
    }
    return db_flush(talk.asks, DOORBELL_EXCLUSIVE, 5 * SECOND, nullptr);
}

__device__ uint64_t answer(const Talk &talk)
{
    // Questions bring their number as the immediate; their bytes are not looked at, but need a place.
    const uint64_t question = talk.address + RECEIVES * ANSWER;
    uint64_t ticket = 0;
    for (uint32_t i = 0; i < RECEIVES; i++) {
        uint64_t error = db_recv_post(talk.answers, question + i * 8, talk.key, 8, DOORBELL_EXCLUSIVE, SECOND, &ticket);
        if (error != 0)
            return error;
    }
    const uint32_t from = (RECEIVES + 1) * ANSWER;
    for (uint64_t n = 0; n < ROUNDS; n++) {
        doorbell_received got = {};
        uint64_t error = db_recv_wait(talk.answers, n, 5 * SECOND, &got);
        if (error != 0)
            return error;
        if (got.arrival != DOORBELL_ARRIVAL_SEND_IMM || got.bytes != 8 || got.imm != uint32_t(n))
            return UINT64_MAX;
        // The slot again, as it was.
        error = db_recv_repost(talk.answers, 1, DOORBELL_EXCLUSIVE, SECOND, nullptr);
        for (uint32_t i = 0; i < ANSWER; i++)
            talk.memory[from + i] = answer_byte(n, i);
        __threadfence_system();
        if (error == 0)
            error = db_send(talk.answers, talk.address + from, talk.key, ANSWER, DOORBELL_EXCLUSIVE, SECOND, &ticket);
        // The next answer is written over this one.
        if (error == 0)
            error = db_wait(talk.answers, ticket, DOORBELL_EXCLUSIVE, 5 * SECOND, nullptr);
        if (error != 0)
            return error;
    }
    return 0;
}

__global__ void talk(Talk talk)
{
    if (threadIdx.x == 0)
        talk.errors[blockIdx.x] = blockIdx.x == 0 ? ask(talk) : answer(talk);
}

} // namespace

int main()
{
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        std::fprintf(stderr, "skipped: there is no CUDA GPU here\n");
        return 77;
    }
    // Loads this program's kernels now: the first launch of another kernel would wait for the one that is running.
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    CU(cudaSetDevice(0));
    CU(cudaFree(nullptr));
    doorbell_device_attr attr = DOORBELL_DEVICE_ATTR_INIT;
    attr.gpu = "cuda:0";
    doorbell_device *device;
    DB(doorbell_device_open(&attr, &device));

    doorbell_pd *pd;
    DB(doorbell_pd_alloc(device, &pd));
    void *memory;
    CU(cudaMallocHost(&memory, BYTES));
    doorbell_mem *mem;
    doorbell_mr *mr;
    doorbell_mr_info info = DOORBELL_MR_INFO_INIT;
    DB(doorbell_mem_import(device, reinterpret_cast<uint64_t>(memory), BYTES, 0, &mem));
    DB(doorbell_mr_register(pd, mem, DOORBELL_ACCESS_ALL, DOORBELL_ADDRESS_BASED, &mr));
    DB(doorbell_mr_query(mr, &info));

    doorbell_qp_attr with_receives = DOORBELL_QP_ATTR_INIT;
    with_receives.receives = RECEIVES;
    doorbell_qp *asks, *answers;
    DB(doorbell_qp_create(pd, &with_receives, &asks));
    DB(doorbell_qp_create(pd, &with_receives, &answers));
    DB(doorbell_qp_connect_local(asks, answers));
    DB(doorbell_qp_connect_local(answers, asks));
    Talk work = {};
    DB(doorbell_qp_export(asks, &work.asks));
    DB(doorbell_qp_export(answers, &work.answers));
    work.memory = static_cast<volatile unsigned char *>(memory);
    work.address = info.address;
    work.key = info.key;
    CU(cudaMallocHost(&work.errors, 2 * sizeof(uint64_t)));

    cudaStream_t stream;
    CU(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    talk<<<2, 32, 0, stream>>>(work);
    CU(cudaGetLastError());
    CU(cudaStreamSynchronize(stream));
    for (int b = 0; b < 2; b++) {
        if (work.errors[b] != 0) {
            doorbell_qp_error_info error = DOORBELL_QP_ERROR_INFO_INIT;
            DB(doorbell_qp_error(b == 0 ? asks : answers, &error));
            std::fprintf(stderr, "block %d: device error %#" PRIx64 "; %s\n", b, work.errors[b], error.text);
            return 1;
        }
    }
    std::printf("%u questions, %u answers of %u bytes, every byte right\n", ROUNDS, ROUNDS, ANSWER);

    DB(doorbell_qp_destroy(asks, 5 * SECOND));
    DB(doorbell_qp_destroy(answers, 5 * SECOND));
    DB(doorbell_mr_deregister(mr, 5 * SECOND));
    DB(doorbell_mem_free(mem));
    CU(cudaFreeHost(memory));
    CU(cudaFreeHost(work.errors));
    CU(cudaStreamDestroy(stream));
    DB(doorbell_pd_free(pd));
    DB(doorbell_device_close(device));
    std::puts("ok");
    return 0;
}
