// CUDA C++ that posts to Doorbell's queues, without a line of Rust: libdoorbell.so makes the queues, the shipped PTX has the
// device functions, nvcc -rdc links them.
//
// 32 blocks of 64 threads; each block has a queue pair that its threads share. Every thread puts its own 64-byte record into the
// target buffer, the last one of a block waits for all and adds 1 to a signal. The host then compares every byte. After that one
// kernel uses a key that nobody gave out and must get an error instead of hanging.
//
// Exit status 0: all as it should be; 77: there is no CUDA GPU here.
#include <cuda_runtime.h>
#include <doorbell.h>
#include <doorbell_device.h>

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr uint64_t SECOND = 1000000000;
constexpr int BLOCKS = 32, THREADS = 64, RECORD = 64;
constexpr size_t BYTES = size_t(BLOCKS) * THREADS * RECORD;
constexpr size_t SIGNAL = BYTES, TOTAL = BYTES + 64;

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

struct Work {
    doorbell_qp_t qps[BLOCKS];
    uint64_t source, target; // addresses as work requests name them
    uint32_t source_key, target_key;
    uint64_t *errors; // one word a block: 0, or the first error of one of its threads
};

__global__ void put_records(Work work)
{
    const doorbell_qp_t qp = work.qps[blockIdx.x];
    const uint64_t offset = (uint64_t(blockIdx.x) * THREADS + threadIdx.x) * RECORD;
    uint64_t ticket = 0;
    uint64_t error = db_put(qp, work.target + offset, work.target_key, work.source + offset, work.source_key,
                            RECORD, DOORBELL_BLOCK, SECOND, &ticket);
    if (error == 0)
        error = db_wait(qp, ticket, DOORBELL_BLOCK, 5 * SECOND, nullptr);
    if (error != 0)
        atomicCAS(reinterpret_cast<unsigned long long *>(&work.errors[blockIdx.x]), 0ull, static_cast<unsigned long long>(error));
    __syncthreads();
    if (threadIdx.x == 0 && work.errors[blockIdx.x] == 0) {
        error = db_signal_add(qp, work.target + SIGNAL, work.target_key, 1, DOORBELL_BLOCK, SECOND, &ticket);
        if (error == 0)
            error = db_wait(qp, ticket, DOORBELL_BLOCK, 5 * SECOND, nullptr);
        work.errors[blockIdx.x] = error;
    }
}

// Registered memory of one of three kinds.
struct Buffer {
    doorbell_mem *mem = nullptr;
    doorbell_mr *mr = nullptr;
    doorbell_mr_info info = DOORBELL_MR_INFO_INIT;
    void *cuda = nullptr; // if it came from cudaMalloc

    void make(doorbell_device *device, doorbell_pd *pd, const char *kind)
    {
        if (kind[0] == 'c') {
            CU(cudaMalloc(&cuda, TOTAL));
            CU(cudaMemset(cuda, 0, TOTAL));
            CU(cudaDeviceSynchronize());
            DB(doorbell_mem_import(device, reinterpret_cast<uint64_t>(cuda), TOTAL, 1, &mem));
        } else {
            DB(doorbell_mem_alloc(device, kind[0] == 'g' ? DOORBELL_MEM_GPU : DOORBELL_MEM_HOST, TOTAL, &mem));
        }
        DB(doorbell_mr_register(pd, mem, DOORBELL_ACCESS_ALL, DOORBELL_ADDRESS_BASED, &mr));
        DB(doorbell_mr_query(mr, &info));
    }
    void write(const std::vector<unsigned char> &bytes)
    {
        if (cuda)
            CU(cudaMemcpy(cuda, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
        else
            DB(doorbell_mem_write(mem, 0, bytes.data(), bytes.size()));
    }
    void read(std::vector<unsigned char> &bytes)
    {
        if (cuda)
            CU(cudaMemcpy(bytes.data(), cuda, bytes.size(), cudaMemcpyDeviceToHost));
        else
            DB(doorbell_mem_read(mem, 0, bytes.data(), bytes.size()));
    }
    void end()
    {
        DB(doorbell_mr_deregister(mr, 5 * SECOND));
        DB(doorbell_mem_free(mem));
        if (cuda)
            CU(cudaFree(cuda));
    }
};

void run(doorbell_device *device, const char *from, const char *to)
{
    doorbell_pd *pd;
    DB(doorbell_pd_alloc(device, &pd));
    Buffer source, target;
    source.make(device, pd, from);
    target.make(device, pd, to);
    std::vector<unsigned char> sent(TOTAL), got(TOTAL);
    for (size_t i = 0; i < BYTES; i++)
        sent[i] = static_cast<unsigned char>(i * 13 + (i >> 8));
    source.write(sent);

    Work work = {};
    std::vector<doorbell_qp *> qps(BLOCKS);
    for (int b = 0; b < BLOCKS; b++) {
        DB(doorbell_qp_create(pd, nullptr, &qps[b]));
        DB(doorbell_qp_connect_local(qps[b], qps[b]));
        DB(doorbell_qp_export(qps[b], &work.qps[b]));
    }
    work.source = source.info.address;
    work.source_key = source.info.key;
    work.target = target.info.address;
    work.target_key = target.info.key;
    CU(cudaMallocHost(&work.errors, BLOCKS * sizeof(uint64_t)));
    for (int b = 0; b < BLOCKS; b++)
        work.errors[b] = 0;

    // A stream that does not wait for the default one: copies to and from GPU memory must run beside the kernel.
    cudaStream_t stream;
    CU(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    put_records<<<BLOCKS, THREADS, 0, stream>>>(work);
    CU(cudaGetLastError());
    CU(cudaStreamSynchronize(stream));
    for (int b = 0; b < BLOCKS; b++) {
        if (work.errors[b] != 0) {
            doorbell_qp_error_info error = DOORBELL_QP_ERROR_INFO_INIT;
            DB(doorbell_qp_error(qps[b], &error));
            std::fprintf(stderr, "block %d: device error %#" PRIx64 "; %s\n", b, work.errors[b], error.text);
            std::exit(1);
        }
    }
    target.read(got);
    for (size_t i = 0; i < BYTES; i++) {
        if (got[i] != sent[i]) {
            std::fprintf(stderr, "%s to %s: byte %zu is %u, not %u\n", from, to, i, got[i], sent[i]);
            std::exit(1);
        }
    }
    const uint64_t signal = *reinterpret_cast<uint64_t *>(&got[SIGNAL]);
    if (signal != BLOCKS) {
        std::fprintf(stderr, "the signal is %" PRIu64 ", not %d\n", signal, BLOCKS);
        std::exit(1);
    }
    std::printf("%s to %s: %zu bytes in %d puts, signal %" PRIu64 "\n", from, to, BYTES, BLOCKS * THREADS, signal);

    // A wrong key: an error that says so, not a hang; the host sees the same.
    work.target_key ^= 1;
    put_records<<<BLOCKS, THREADS, 0, stream>>>(work);
    CU(cudaGetLastError());
    CU(cudaStreamSynchronize(stream));
    for (int b = 0; b < BLOCKS; b++) {
        doorbell_qp_error_info error = DOORBELL_QP_ERROR_INFO_INIT;
        DB(doorbell_qp_error(qps[b], &error));
        if (work.errors[b] == 0 || error.kind != DOORBELL_ERROR_COMPLETION) {
            std::fprintf(stderr, "block %d took a wrong key: %#" PRIx64 ", %s\n", b, work.errors[b], error.text);
            std::exit(1);
        }
        if (b == 0)
            std::printf("wrong key: device error %#" PRIx64 "; host: %s\n", work.errors[b], error.text);
    }

    for (doorbell_qp *qp : qps)
        DB(doorbell_qp_destroy(qp, 5 * SECOND));
    source.end();
    target.end();
    CU(cudaFreeHost(work.errors));
    CU(cudaStreamDestroy(stream));
    DB(doorbell_pd_free(pd));
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
    doorbell_device_info info = DOORBELL_DEVICE_INFO_INIT;
    DB(doorbell_device_query(device, &info));
    std::printf("doorbell %s on %s\n", doorbell_version(), info.name);

    run(device, "host", "host");
    run(device, "gpu", "host");
    run(device, "host", "gpu");
    run(device, "cudaMalloc", "host");
    DB(doorbell_device_close(device));
    std::puts("ok");
    return 0;
}
