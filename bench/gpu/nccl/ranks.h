// What the programs of this folder share: how calls fail, what ranks are (threads or processes), and how a run of a kernel ends.
#pragma once
#include <cuda_runtime.h>
#include <nccl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#define OK(call, good, text)                                                              \
  do {                                                                                    \
    auto e = (call);                                                                      \
    if (e != good) fprintf(stderr, "FAILED %s: %s\n", #call, text(e).c_str()), _exit(1);  \
  } while (0)
#define CUDA(call) OK(call, cudaSuccess, [](cudaError_t e) { return std::string(cudaGetErrorString(e)); })
#define NCCL(call) OK(call, ncclSuccess, [](ncclResult_t e) { return ncclGetErrorString(e) + std::string(" (") + ncclGetLastError(nullptr) + ")"; })

static const char* mode = "checks";
[[maybe_unused]] static bool is_mode(const char* name) { return !strcmp(mode, name); }

[[maybe_unused]] static double seconds(clockid_t clock = CLOCK_MONOTONIC) {
  timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

struct Shared {
  pthread_barrier_t together;
  ncclUniqueId id;
  int failures;
  int ended;    // ranks that are at their end
  int stuck;    // ranks whose kernel does not end
  int explained;
  int threads;  // ranks of one process; 0: a process each
};
static Shared* shared;
static pthread_mutex_t printing = PTHREAD_MUTEX_INITIALIZER;
// CPU cores of this process in the last run.
static double cores;
// What goes well is not said.
[[maybe_unused]] static bool quiet = false;

[[maybe_unused]] static void together() { pthread_barrier_wait(&shared->together); }

// A communicator of all ranks, on this rank's GPU.
[[maybe_unused]] static ncclComm_t meet_ranks(int rank, int ranks) {
  int gpus = 0;
  CUDA(cudaGetDeviceCount(&gpus));
  if (rank == 0) NCCL(ncclGetUniqueId(&shared->id));
  together();
  CUDA(cudaSetDevice(rank % gpus));
  ncclComm_t comm;
  NCCL(ncclCommInitRank(&comm, ranks, shared->id, rank));
  int version = 0;
  NCCL(ncclGetVersion(&version));
  if (rank == 0) printf("NCCL %d.%d.%d, ranks %d, GPUs %d\n", version / 10000, version / 100 % 100, version % 100, ranks, gpus);
  return comm;
}

// A kernel does not end: the command that EXPLAIN names says, once, what the queue pairs of all ranks stand at.
[[maybe_unused]] static void explain() {
  const char* command = getenv("EXPLAIN");
  if (!command) return;
  if (__atomic_fetch_add(&shared->stuck, 1, __ATOMIC_RELAXED) == 0) {
    if (system(command)) fprintf(stderr, "FAILED: %s\n", command);
    __atomic_store_n(&shared->explained, 1, __ATOMIC_RELEASE);
  }
  // Whoever ends first ends all.
  for (double begin = seconds(); !__atomic_load_n(&shared->explained, __ATOMIC_ACQUIRE) && seconds() - begin < 12;)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

// Waits for a kernel; looks at what NCCL says meanwhile, as an application should.
[[maybe_unused]] static void finish(ncclComm_t comm, cudaStream_t stream, int rank, const char* name, volatile unsigned long long* out) {
  double begin = seconds();
  for (;;) {
    cudaError_t e = cudaStreamQuery(stream);
    if (e == cudaSuccess) return;
    if (e != cudaErrorNotReady) {
      fprintf(stderr, "FAILED %s: rank %d: %s\n", name, rank, cudaGetErrorString(e));
      _exit(1);
    }
    ncclResult_t async = ncclSuccess;
    ncclCommGetAsyncError(comm, &async);
    bool late = seconds() - begin > 20;
    if ((async != ncclSuccess && async != ncclInProgress) || late) {
      fprintf(stderr, "FAILED %s: rank %d: %s (its last stage: %llu, %llu)\n", name, rank, late ? "the kernel does not end" : ncclGetErrorString(async), out[2], out[3]);
      fflush(nullptr);
      if (late) explain();
      _exit(3);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// Runs a kernel on all ranks at once; what they report is summed (first word: what is wrong) and given to rank 0 (second);
// the third and fourth say how far one came that does not end.
template <typename Job, typename Launch>
unsigned long long run(ncclComm_t comm, cudaStream_t stream, int rank, Job& job, const char* name, int rounds, size_t bytes, Launch launch) {
  job.rounds = rounds;
  job.bytes = bytes;
  for (int i = 0; i < 4; i++) job.out[i] = 0;
  CUDA(cudaMemsetAsync(job.memory, 0, job.size, stream));
  CUDA(cudaStreamSynchronize(stream));
  together();
  double wall = seconds(), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
  launch(job);
  CUDA(cudaGetLastError());
  finish(comm, stream, rank, name, job.out);
  wall = seconds() - wall, cpu = seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
  pthread_mutex_lock(&printing);
  if (rank == 0) cores = cpu / wall;
  if (job.out[0]) {
    __atomic_fetch_add(&shared->failures, 1, __ATOMIC_RELAXED);
    printf("FAILED %s: rank %d: %llu wrong\n", name, rank, job.out[0]);
  } else if (rank == 0 && !quiet) {
    printf("ok %s\n", name);
  }
  fflush(stdout);
  pthread_mutex_unlock(&printing);
  together();
  return job.out[1];
}

// A kernel waits for ever, since a script fails its work, or (mode killed) rank 1 dies a second from now, or (mode stopped) stands still from then on.
// Every host must hear why, and the job end: it does not return.
[[maybe_unused]] static void told(ncclComm_t comm, cudaStream_t stream, int rank) {
  double begin = seconds();
  auto since = [&] { return (seconds() - begin) * 1e3; };
  bool dies = is_mode("killed"), stops = is_mode("stopped");
  if (rank == 1 && (dies || stops)) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    kill(getpid(), dies ? SIGKILL : SIGSTOP);
    _exit(0);  // when it goes on
  }
  ncclResult_t async = ncclSuccess;
  while (async == ncclSuccess || async == ncclInProgress) {
    if (since() > 20000) {
      printf("FAILED %s: rank %d: its host hears nothing\n", mode, rank);
      fflush(nullptr);
      _exit(1);
    }
    NCCL(ncclCommGetAsyncError(comm, &async));
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  printf("ok %s: rank %d: ncclCommGetAsyncError says \"%s\" after %.0f ms%s\n", mode, rank, ncclGetErrorString(async), since(),
         dies || stops ? ", 1000 of them before it happened" : "");
  const char* release = getenv("DOORBELL_ON_ERROR");
  if (release && !strcmp(release, "release")) {
    while (cudaStreamQuery(stream) == cudaErrorNotReady && since() < 25000) std::this_thread::sleep_for(std::chrono::microseconds(200));
    bool ended = cudaStreamQuery(stream) == cudaSuccess;
    printf("%s %s: rank %d: the kernel %s after %.0f ms\n", ended ? "ok" : "FAILED", mode, rank, ended ? "was let go" : "spins", since());
    if (!ended) __atomic_fetch_add(&shared->failures, 1, __ATOMIC_RELAXED);
  }
  fflush(stdout);
  // Kernels may spin still: the job ends all the same. Threads wait for each other.
  if (__atomic_add_fetch(&shared->ended, 1, __ATOMIC_RELAXED) == shared->threads || !shared->threads) _exit(shared->failures ? 1 : 0);
  pause();
}

// Runs `body(rank, ranks)` as `PROGRAM [RANKS] [threads|processes] [MODE]` says. The exit status is the worst of theirs.
template <typename Body>
int start(int argc, char** argv, Body body) {
  // Kernels that wait for copies must not meet the loading of others, nor share their channel.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  int ranks = argc > 1 ? atoi(argv[1]) : 2;
  bool processes = argc > 2 && !strcmp(argv[2], "processes");
  if (argc > 3) mode = argv[3];
  shared = (Shared*)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  shared->threads = processes ? 0 : ranks;
  pthread_barrierattr_t attributes;
  pthread_barrierattr_init(&attributes);
  pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(&shared->together, &attributes, ranks);
  int worst = 0;
  if (processes) {
    // Before CUDA is used: it does not survive a fork.
    std::vector<pid_t> all;
    for (int r = 0; r < ranks; r++) {
      pid_t child = fork();
      if (child == 0) {
        // Scripts are for rank 0: the others hear of it.
        if (r) unsetenv("DOORBELL_FAULT");
        // NCCL takes ranks of different names for ranks of different hosts.
        if (getenv("HOSTS_APART")) setenv("NCCL_HOSTID", ("host " + std::to_string(r)).c_str(), 1);
        body(r, ranks);
        fflush(nullptr);
        _exit(0);
      }
      all.push_back(child);
    }
    for (int left = ranks; left > 0; left--) {
      // Who stands still is waited for by nobody.
      if (is_mode("stopped") && left == 1) kill(all[1], SIGKILL);
      int status = 0;
      wait(&status);
      int code = WIFEXITED(status) ? WEXITSTATUS(status) : 4;
      if ((is_mode("killed") || is_mode("stopped")) && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) code = 0;
      worst = code > worst ? code : worst;
      if (code) break;  // the others would wait for it
    }
    if (worst) {
      signal(SIGTERM, SIG_IGN);
      kill(0, SIGTERM);
    }
  } else {
    std::vector<std::thread> all;
    for (int r = 0; r < ranks; r++) all.emplace_back(body, r, ranks);
    for (auto& t : all) t.join();
  }
  if (shared->failures)
    printf("%d check(s) FAILED\n", shared->failures);
  else if (worst)
    printf("a rank ended with %d: see its FAILED line\n", worst);
  else
    printf("all checks passed\n");
  return shared->failures ? 1 : worst;
}
