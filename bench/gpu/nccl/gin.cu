// NCCL's device interface, call by call, on whatever GIN backend NCCL chose: checks first, then half round trips and rates.
//
//     gin [RANKS] [threads|processes] [MODE]   what the ranks are; rank r uses GPU r modulo their number (several on one GPU need
//                                       NCCL_MULTI_RANK_GPU_ENABLE=1). Prints "ok NAME" or "FAILED NAME: why" for each check.
//
//     MODE  checks   (default) every call, then half round trips and rates
//           rates    rates against blocks and contexts, large puts, half round trips
//           trip     half round trips alone
//           million  a million signals, none of which may be lost; a million words with a signal each, each there when its signal says so
//           again    hundreds of short kernels in all sharing modes, for what gets lost where queues begin, end and fall silent
//           huge     a put and a get of more than 2 GiB each
//           fault    DOORBELL_FAULT fails a request of rank 0: every rank's host must hear of it (the row says when); then the job exits although
//                    kernels spin, or, with DOORBELL_ON_ERROR=release, when they were let go
//           killed   (processes) rank 1 is killed at work: likewise
//           stopped  (processes) rank 1 stands still from one moment to the next (SIGSTOP): likewise
//
// What arrives is compared in every mode, rates included. Rows of figures name the CPU cores that this process used meanwhile.
//
// Exit status: 0, 1 a check failed, 3 a kernel did not end or NCCL reported an asynchronous error.
#include "kernels.cuh"

static int BLOCKS = 4, CONTEXTS = 4;

struct Rank {
  int rank, ranks;
  ncclComm_t comm;
  cudaStream_t stream;
  char* strict;  // memory of the window of strict order
  Job job;
};

template <typename Launch>
static unsigned long long run(Rank& r, const char* name, int rounds, size_t bytes, Launch launch) {
  return run(r.comm, r.stream, r.rank, r.job, name, rounds, bytes, launch);
}

// Words with a signal each, by threads of many blocks.
static unsigned long long run_hammer(Rank& r, const char* name, int mode, int blocks, int rounds) {
  auto s = r.stream;
  unsigned long long ns = run(r, name, rounds, 0, [=](Job j) { hammer<<<blocks, 32, 0, s>>>(j, mode); });
  if (mode == 0) r.job.before += 32ull * rounds * blocks;
  return ns;
}

// Every call once, and what it must have done.
static void checks(Rank& r) {
  int ranks = r.ranks;
  auto s = r.stream;
  run(r, "all-to-all, 8 B", 20, 8, [=](Job j) { all_to_all<<<1, 64, 0, s>>>(j); });
  run(r, "all-to-all, 4 KiB", 5, 4096, [=](Job j) { all_to_all<<<1, 64, 0, s>>>(j); });
  run(r, "all-to-all, 1 MiB", 2, ranks > 4 ? 1 << 18 : 1 << 20, [=](Job j) { all_to_all<<<1, 256, 0, s>>>(j); });
  run(r, "put value", 1, 0, [=](Job j) { values<<<1, 32, 0, s>>>(j); });
  run(r, "counters", 20, 0, [=](Job j) { counters<<<1, 32, 0, s>>>(j); });
  run(r, "get", 1, 100000, [=](Job j) { gets<<<1, 64, 0, s>>>(j); });
  run(r, "VA signals", 20, 0, [=](Job j) { va_signals<<<1, 32, 0, s>>>(j); });
  run(r, "aggregate", 1, 0, [=](Job j) { aggregate<<<1, 64, 0, s>>>(j); });
  run(r, "flush of one request", 50, 0, [=](Job j) { flush_each<<<1, 32, 0, s>>>(j); });
  if (!r.strict) return;
  // Its kernel sees the other window's memory.
  std::swap(r.job.memory, r.strict);
  run(r, "a window of strict order", 200, 0, [=](Job j) { strict_order<<<1, 64, 0, s>>>(j); });
  std::swap(r.job.memory, r.strict);
  run(r, "a signal's shadow and reset", 50, 0, [=](Job j) { shadows<<<1, 32, 0, s>>>(j); });
}

static void million(Rank& r) {
  auto s = r.stream;
  run(r, "a million signals", 1000000 / (BLOCKS * 32) + 1, 0, [=](Job j) { signals<<<BLOCKS, 32, 0, s>>>(j); });
  int rounds = 1000000 / BLOCKS;
  unsigned long long ns = run(r, "a million words, each there when its signal says so", rounds, 0, [=](Job j) { read_along<<<BLOCKS, 64, 0, s>>>(j); });
  if (r.rank == 0 && ns) printf("rate put 8 B + signal, one thread a context: %.3f M/s a rank; %.2f cores\n", double(rounds) * BLOCKS * 1e3 / ns, cores);
}

// What a ring, a request or a signal that is lost does not show while others follow it, it shows at the end of a kernel.
static void again(Rank& r) {
  auto s = r.stream;
  int kernels = 600;
  double begin = seconds();
  quiet = true;
  for (int i = 0; i < kernels; i++) {
    char name[64];
    snprintf(name, sizeof name, "again: kernel %d of %d", i, kernels);
    // A block's mode mostly: there all queues have several posters, and all are at work.
    int mode = i % 6 == 0 ? 0 : i % 6 == 1 ? 2 : 1, rounds = 1 + i * 7 % 40, blocks = 1 + i * 5 % BLOCKS;
    if (i % 3 == 2) blocks = BLOCKS;
    if (i % 6 == 5)
      run(r, name, rounds, 0, [=](Job j) { signals<<<blocks, 32, 0, s>>>(j); });
    else
      run_hammer(r, name, mode, blocks, rounds);
  }
  quiet = false;
  if (r.rank == 0 && !shared->failures) printf("ok again: %d kernels in %.1f s\n", kernels, seconds() - begin);
}

static void huge(Rank& r) {
  auto s = r.stream;
  size_t bytes = (2ul << 30) + 4104;
  for (bool get : {false, true}) {
    unsigned long long ns = run(r, get ? "a get of more than 2 GiB" : "a put of more than 2 GiB with a signal", 1 + get, bytes, [=](Job j) {
      fill<<<256, 256, 0, s>>>(j);
      move<<<1, 32, 0, s>>>(j, get);
      compare<<<256, 256, 0, s>>>(j);
    });
    if (r.rank == 0 && ns) printf("bandwidth %s of %zu B: %.1f GB/s a rank; %.2f cores\n", get ? "get" : "put", bytes, double(bytes) / ns, cores);
  }
}

static void trips(Rank& r, std::vector<size_t> sizes) {
  auto s = r.stream;
  for (size_t bytes : sizes) {
    char name[64];
    snprintf(name, sizeof name, bytes ? "ping-pong, %zu B and a signal" : "ping-pong, a signal", bytes);
    unsigned long long ns = run(r, name, bytes > 65536 ? 100 : 1000, bytes, [=](Job j) { ping_pong<<<1, 32, 0, s>>>(j); });
    if (r.rank == 0) printf("half round trip %s: %.2f us; %.2f cores\n", name, ns / 1e3, cores);
  }
}

static void rates(Rank& r) {
  int rank = r.rank, ranks = r.ranks;
  auto s = r.stream;
  const char* modes[] = {"shared by the GPU", "shared by a block", "a thread's own"};
  for (int mode = 0; mode < 3; mode++) {
    int rounds = mode == 2 ? 500 : 50, threads = 32;
    unsigned long long ns = run_hammer(r, modes[mode], mode, BLOCKS, rounds);
    double posts = double(rounds) * (mode == 2 ? 1 : threads) * BLOCKS;
    if (rank == 0 && ns) printf("rate put 8 B + signal, %s: %.3f M/s a rank; %.2f cores\n", modes[mode], posts * 1e3 / ns, cores);
  }
  if (ranks > 1) trips(r, {0, 8, 4096, 65536, 1 << 20});
  if (!is_mode("rates")) return;
  unsigned long long each = run(r, "all-to-alls of 8 B", 1000, 8, [=](Job j) { exchange<<<1, 32, 0, s>>>(j); });
  if (rank == 0) printf("all-to-all of 8 B: %.2f us a round; %.2f cores\n", each / 1e6, cores);
  for (int blocks = 1; blocks <= BLOCKS; blocks *= 2) {
    char name[64];
    snprintf(name, sizeof name, "%d block(s), a context each", blocks);
    int rounds = 500;
    unsigned long long ns = run_hammer(r, name, 1, blocks, rounds);
    if (rank == 0 && ns) printf("rate put 8 B + signal, %s: %.3f M/s a rank; %.2f cores\n", name, rounds * 32.0 * blocks * 1e3 / ns, cores);
    ns = run(r, name, rounds, 0, [=](Job j) { signals<<<blocks, 32, 0, s>>>(j); });
    if (rank == 0 && ns) printf("rate signal, %s: %.3f M/s a rank; %.2f cores\n", name, rounds * 32.0 * blocks * 1e3 / ns, cores);
  }
  for (size_t bytes : {1ul << 16, 1ul << 20, 4ul << 20, 16ul << 20}) {
    char name[64];
    snprintf(name, sizeof name, "puts of %zu B", bytes);
    int rounds = bytes > 1 << 20 ? 200 : 1000;
    unsigned long long ns = run(r, name, rounds, bytes, [=](Job j) { large<<<1, 256, 0, s>>>(j); });
    if (rank == 0 && ns) printf("bandwidth %s: %.1f GB/s a rank; %.2f cores\n", name, double(rounds) * bytes / ns, cores);
  }
}

// What goes wrong at work: hosts must hear of it.
static void trouble(Rank& r) {
  bool answers = is_mode("killed") || is_mode("stopped");
  r.job.rounds = answers ? 1 << 30 : 200, r.job.bytes = 8;
  together();
  if (answers)
    ping_pong<<<1, 32, 0, r.stream>>>(r.job);
  else
    stuck<<<1, 32, 0, r.stream>>>(r.job);
  CUDA(cudaGetLastError());
  told(r.comm, r.stream, r.rank);
}

static void body(int rank, int ranks) {
  Rank r{};
  r.rank = rank;
  r.ranks = ranks;
  r.comm = meet_ranks(rank, ranks);
  ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
  NCCL(ncclCommQueryProperties(r.comm, &properties));
  if (rank == 0) printf("device API %d, GIN type %d\n", (int)properties.deviceApiSupport, (int)properties.ginType);
  void* memory;
  r.job.size = is_mode("huge") ? 5ul << 30 : 64 << 20;
  NCCL(ncclMemAlloc(&memory, r.job.size));
  NCCL(ncclCommWindowRegister(r.comm, memory, r.job.size, &r.job.win, NCCL_WIN_COLL_SYMMETRIC));
  // NCCL gives one window a piece of memory, so the strict one has its own; only its check uses it.
  if (is_mode("checks")) {
    NCCL(ncclMemAlloc((void**)&r.strict, r.job.size));
    NCCL(ncclCommWindowRegister(r.comm, r.strict, r.job.size, &r.job.strict, NCCL_WIN_COLL_SYMMETRIC | NCCL_WIN_STRICT_ORDERING));
  }
  r.job.memory = (char*)memory;
  ncclDevCommRequirements needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  needs.worldGinBarrierCount = BLOCKS;
  needs.ginSignalCount = SIGNALS;
  needs.ginCounterCount = COUNTERS;
  needs.ginContextCount = CONTEXTS;
  needs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
  NCCL(ncclDevCommCreate(r.comm, &needs, &r.job.comm));
  CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
  CUDA(cudaHostAlloc((void**)&r.job.out, 64, cudaHostAllocMapped | cudaHostAllocPortable));
  bool works = is_mode("checks") || is_mode("rates") || is_mode("trip") || is_mode("million") || is_mode("again") || is_mode("huge");
  if (!works) trouble(r);
  if (is_mode("checks")) checks(r);
  if (is_mode("trip")) trips(r, {0, 8});
  if (is_mode("million")) million(r);
  if (is_mode("again")) again(r);
  if (is_mode("huge")) huge(r);
  if (is_mode("checks") || is_mode("rates")) rates(r);
  NCCL(ncclDevCommDestroy(r.comm, &r.job.comm));
  NCCL(ncclCommWindowDeregister(r.comm, r.job.win));
  if (r.strict) NCCL(ncclCommWindowDeregister(r.comm, r.job.strict));
  NCCL(ncclMemFree(memory));
  if (r.strict) NCCL(ncclMemFree(r.strict));
  together();
  NCCL(ncclCommFinalize(r.comm));
  NCCL(ncclCommDestroy(r.comm));
}

int main(int argc, char** argv) {
  if (argc > 3 && (!strcmp(argv[3], "rates") || !strcmp(argv[3], "again"))) BLOCKS = CONTEXTS = 16;
  return start(argc, argv, body);
}
