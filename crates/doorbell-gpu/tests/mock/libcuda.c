/* A stand-in for the CUDA driver library, for tests on machines without a GPU.
 *
 * Device memory is the heap, copies are memcpy, a few kernels are known by name. What it is for is the bookkeeping: it
 * counts as violations what would hang or spoil a real process (a free or a load while a kernel runs, a copy within one
 * GPU, the legacy stream, a call without a context or with a strict capture mode, an address it never gave out).
 * The prototypes are those of NVIDIA's cuda.h, written down after its documentation.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int R;
typedef uint64_t P;
enum { OK = 0, INVALID = 1, NO_DEVICE = 100, NO_CONTEXT = 201, NOT_FOUND = 500, NOT_READY = 600, FAULT = 700 };

#ifndef BATCH
#define BATCH 2
#endif
#ifndef DEVICES
#define DEVICES 2
#endif

struct range { P start; size_t size; int type, device, live, vmm, fd; /* of shareable memory; else -1 */ int refs; size_t pad; /* reserved around it */ int registered; int owner; /* 0: its GPU's primary context; 1: another; 2: an open pool; 3: a closed one */ };
struct stream { int priority; P wait_flag; };
struct event { int recorded; P wait_flag; struct stream *stream; };
struct function { char name[64]; int loaded; };
struct module { char *text; };

static struct range ranges[4096];
static int range_count;
static P kernels[64]; /* flags that running kernels wait for */
static int kernel_count;
static uint64_t hold_copies_release = 1;
static int sticky;
static int staying; /* kernels that have done what they were launched for, and are there still */
static uint64_t stay_ns; /* how long the newest of these was told to */
static uint64_t context_id = 1; /* another after a reset */
static struct {
    uint64_t violations, allocs, frees, batches, batched_copies, copies, retains, releases, streams, events, modules, maps, launches, kernel_copies, staying_jobs, late;
} n;
static char violation[256];

static __thread int depth;
static __thread int stack[64];
static __thread int mode; /* 0 global, 2 relaxed */

static void violate(const char *what) {
    n.violations++;
    snprintf(violation, sizeof violation, "%s", what);
}

static int running(void) {
    int r = 0;
    for (int i = 0; i < kernel_count; i++)
        if (*(volatile uint64_t *)kernels[i] == 0) r++;
    return r;
}

/* The driver locks what it has; so does this. Held until the function that entered returns. */
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static void unlock(pthread_mutex_t **held) { pthread_mutex_unlock(*held); }

static R enter(const char *call) {
    if (depth == 0) { violate(call); return NO_CONTEXT; }
    if (mode != 2) violate("strict capture mode");
    return sticky ? FAULT : OK;
}
#define ENTER \
    __attribute__((cleanup(unlock), unused)) pthread_mutex_t *held = (pthread_mutex_lock(&lock), &lock); \
    do { R r = enter(__func__); if (r) return r; } while (0)

/* As aligned as the driver's. */
static void *block(size_t size) { return aligned_alloc(4096, (size + 4095) & ~4095ul); }

static struct range *find(P a) {
    for (int i = 0; i < range_count; i++)
        if (ranges[i].live && a >= ranges[i].start && a < ranges[i].start + ranges[i].size) return &ranges[i];
    return 0;
}
static P add(P start, size_t size, int type) {
    ranges[range_count++] = (struct range){start, size, type, depth ? stack[depth - 1] : 0, 1, 0, -1, 0, 0};
    return start;
}
static R gone(P a, const char *what) {
    struct range *r = find(a);
    if (running()) violate(what);
    if (!r || r->start != a) return INVALID;
    r->live = 0;
    n.frees++;
    return OK;
}

/* What tests read and set. */
uint64_t mock_get(const char *name) {
#define F(x) if (!strcmp(name, #x)) return n.x;
    F(violations) F(allocs) F(frees) F(batches) F(batched_copies) F(copies) F(retains) F(releases) F(streams) F(events)
    F(modules) F(maps) F(launches) F(kernel_copies) F(staying_jobs) F(late)
    if (!strcmp(name, "staying")) return staying;
    if (!strcmp(name, "stay_ns")) return stay_ns;
    if (!strcmp(name, "depth")) return depth;
    if (!strcmp(name, "mode")) return mode;
    if (!strcmp(name, "running")) return running();
    if (!strcmp(name, "live")) { uint64_t c = 0; for (int i = 0; i < range_count; i++) c += ranges[i].live; return c; }
    return ~0ull;
}
const char *mock_violation(void) { return violation; }
void mock_hold_copies(int hold) { hold_copies_release = !hold; }
void mock_reset(void) { context_id++; }
void mock_push(int device) { stack[depth++] = device; }
void mock_mode(int m) { mode = m; }
/* The copier's kernel, as doorbell-kernels has it. A board is lines of words (taken back; started, done, left), eight posts of two, and eight jobs of 256 steps and 256 copies. */
struct launch { uint64_t *board, number, post[2], stay, life, born; int device, begun; struct stream *stream; int records /* of events behind it */; };
static struct launch launches[64]; /* that have not done their first job */
static int launch_count, launch_us /* that a call takes */, launches_held; /* 1: none starts; 2: the oldest starts and does not end; 3: it does so as it is taken back */
static int deaf; /* 1: those that stay do not look; 2: they leave without looking */
static struct sigaction faults;

static uint64_t now_ns(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000ull + t.tv_nsec; }
static int begin_job(uint64_t *board) {
    __atomic_store_n(&board[8], 1, __ATOMIC_SEQ_CST);
    return !__atomic_load_n(&board[0], __ATOMIC_SEQ_CST);
}
static void kernel_copy(P d, P s, uint64_t size, int device) {
    struct range *a = find(d), *b = find(s);
    if (!a || !b || d + size > a->start + a->size || s + size > b->start + b->size) { violate("a kernel's copy outside memory"); return; }
    if ((a->type == 2 && a->device != device) || (b->type == 2 && b->device != device)) violate("a kernel's copy of memory that it does not reach");
    if (a->owner % 2 || b->owner % 2) violate("a kernel's copy of memory of another context");
    memcpy((void *)d, (void *)s, size);
    n.kernel_copies++;
}
static void run_job(struct launch *l) {
    uint64_t *job = l->board + 32 + l->number % 8 * 1280, *copies = job + 256, at = 0, step = l->post[0];
    const char *pause = getenv("MOCK_BATCH_US");
    if (!(l->post[1] >> 55 & 1)) /* a copy that is all in the post */
        kernel_copy(l->post[1] << 12 >> 12, step << 12 >> 12, step >> 52 | (l->post[1] >> 52 & 7) << 12, l->device);
    else for (int number = 0;; step = job[++number]) {
        uint64_t end = step & 0xfff, len = step >> 32 & 0x7fffffff; /* of each; 0: it says itself */
        for (uint64_t i = end; i-- > at;) { /* in any order */
            kernel_copy(copies[4 * i], copies[4 * i + 1], len ? len : copies[4 * i + 2], l->device);
            if (pause && i > at) usleep(atoi(pause));
        }
        at = end;
        if (step >> 63) break;
    }
    __atomic_store_n(&l->board[9], l->number++, __ATOMIC_RELEASE);
}
/* Was its next job posted? */
static int look(struct launch *l) {
    uint64_t *post = l->board + 16 + l->number % 8 * 2, last = __atomic_load_n(&post[1], __ATOMIC_ACQUIRE);
    if (last >> 56 != ((l->number & 0x7f) | 0x80)) return 0;
    l->post[0] = post[0];
    l->post[1] = last;
    return 1;
}
static void leave(struct launch *l) { __atomic_store_n(&l->board[10], l->number, __ATOMIC_RELEASE); }
static void *stay(void *of) {
    struct launch *l = of;
    for (uint64_t since = now_ns(), now = since;; now = now_ns()) {
        pthread_mutex_lock(&lock);
        int there = deaf != 2 && now - l->born < l->life, job = there && !deaf && look(l);
        int left = !there || (job ? l->post[1] >> 55 & 1 && !l->post[0] : !deaf && now - since >= l->stay);
        if (left) { staying--; leave(l); }
        else if (job) { n.staying_jobs++; run_job(l); since = now_ns(); }
        pthread_mutex_unlock(&lock);
        if (left) break;
        if (!job) usleep(1);
    }
    free(l);
    return 0;
}
/* The host is about to store the word that takes the oldest back: it starts now, and does not see it. */
static void start_late(int sig, siginfo_t *fault, void *context) {
    (void)sig, (void)context;
    sigaction(SIGSEGV, &faults, 0);
    if (fault->si_addr != launches[0].board) return; /* somebody else's: it comes again */
    mprotect(launches[0].board, 4096, PROT_READ | PROT_WRITE);
    launches[0].begun = begin_job(launches[0].board);
    launches_held = 2;
    n.late++;
}
static void run_launches(void) {
    if (launch_count && launches_held == 3) {
        struct sigaction late = {.sa_sigaction = start_late, .sa_flags = SA_SIGINFO};
        if (mprotect(launches[0].board, 4096, PROT_READ) || sigaction(SIGSEGV, &late, &faults)) violate("a board that does not begin a page");
        return;
    }
    while (launch_count && !(launches_held && launches[0].begun) && launches_held != 1) {
        struct launch *l = &launches[0];
        if (!l->begun) l->begun = begin_job(l->board) ? 1 : 2;
        if (l->begun == 1 && launches_held == 2) return;
        if (l->begun == 1) run_job(l);
        pthread_t thread;
        if (l->begun == 2) leave(l);
        else if (l->stay) {
            struct launch *own = malloc(sizeof *own);
            *own = *l;
            if (own->life == 0xffffffff) own->stay = own->life = ~0ull; /* as good as for ever */
            own->born = now_ns();
            /* It may run a moment longer than whoever opened this library. */
            Dl_info self;
            static int kept;
            if (!kept++ && (!dladdr(&launch_count, &self) || !dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE))) violate("a library that does not stay");
            staying++;
            stay_ns = l->stay;
            if (pthread_create(&thread, 0, stay, own) || pthread_detach(thread)) violate("no thread for a kernel");
        } else {
            while (look(l) && (l->post[0] || !(l->post[1] >> 55 & 1))) run_job(l);
            leave(l);
        }
        memmove(launches, launches + 1, --launch_count * sizeof launches[0]);
    }
}
void mock_slow_launches(int us) { launch_us = us; }
void mock_deaf(int how) {
    pthread_mutex_lock(&lock);
    deaf = how;
    pthread_mutex_unlock(&lock);
}
void mock_hold_launches(int hold) {
    pthread_mutex_lock(&lock);
    launches_held = hold;
    run_launches();
    pthread_mutex_unlock(&lock);
}
/* Device memory is a memfd: another process that imports it sees the same bytes. */
static P map(P at, size_t size, int fd, int vmm) {
    void *p = mmap((void *)at, size, PROT_READ | PROT_WRITE, MAP_SHARED | (at ? MAP_FIXED : 0), fd, 0);
    if (p == MAP_FAILED) return 0;
    add((P)p, size, 2);
    ranges[range_count - 1].fd = fd;
    ranges[range_count - 1].vmm = vmm;
    return (P)p;
}
static int memory(size_t size) { int fd = memfd_create("mock GPU memory", MFD_CLOEXEC); return ftruncate(fd, size) ? -1 : fd; }
static P foreign(size_t size, int device, int vmm) {
    pthread_mutex_lock(&lock);
    /* As NCCL maps its windows: somewhere in a reservation that is far larger. */
    size_t pad = vmm ? 64 << 20 : 0;
    P at = (P)mmap(0, size + 2 * pad + (2 << 20), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    P p = map((at + pad + (2 << 20) - 1) & ~(P)((2 << 20) - 1), size, memory(size), vmm);
    ranges[range_count - 1].pad = pad;
    ranges[range_count - 1].device = device;
    pthread_mutex_unlock(&lock);
    return p;
}
/* Two mappings side by side in one reservation, the first of host memory if `host`. */
P mock_foreign_pair(size_t size, int host) {
    pthread_mutex_lock(&lock);
    size_t pad = 64 << 20;
    P at = (P)mmap(0, 2 * size + 2 * pad + (2 << 20), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    at = (at + pad + (2 << 20) - 1) & ~(P)((2 << 20) - 1);
    for (int i = 0; i < 2; i++) {
        map(at + i * size, size, memory(size), 1);
        ranges[range_count - 1].pad = pad;
        ranges[range_count - 1].device = 0;
        if (host && !i) ranges[range_count - 1].type = 1;
    }
    pthread_mutex_unlock(&lock);
    return at;
}
P mock_foreign_owned(size_t size, int owner) {
    P p = foreign(size, 0, 0);
    find(p)->owner = owner;
    return p;
}
P mock_foreign_alloc(size_t size, int device) { return foreign(size, device, 0); }
P mock_foreign_vmm(size_t size, int device) { return foreign(size, device, 1); }

R cuInit(unsigned flags) {
    (void)flags;
#ifdef INIT_FAILS
    return INIT_FAILS;
#endif
    return OK;
}
R cuDriverGetVersion(int *v) { *v = 13000; return OK; }
R cuGetErrorName(R r, const char **s) {
    *s = r == INVALID ? "CUDA_ERROR_INVALID_VALUE" : r == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE"
       : r == FAULT ? "CUDA_ERROR_ILLEGAL_ADDRESS" : r == 218 ? "CUDA_ERROR_INVALID_PTX" : "CUDA_ERROR_MOCK";
    return OK;
}
R cuGetErrorString(R r, const char **s) { (void)r; *s = "mocked"; return OK; }
R cuDeviceGetCount(int *c) { *c = DEVICES; return OK; }
R cuDeviceGet(int *d, int i) { *d = i; return OK; }
R cuDeviceGetName(char *b, int len, int d) { snprintf(b, len, "Mock GPU %d", d); return OK; }
R cuDeviceGetAttribute(int *v, int a, int d) {
    (void)d;
    switch (a) {
    case 1: *v = 1024; break;
    case 5: *v = 0x7fffffff; break;
    case 16: *v = 4; break;
    case 39: *v = 2048; break;
    case 40: *v = 3; break;
    case 75: *v = 9; break;
    case 76: *v = 0; break;
    case 19: case 41: case 102: case 103: case 124: case 125: *v = 1; break;
    case 133: return INVALID; /* an older driver */
    default: *v = 0;
    }
    return OK;
}
R cuDeviceTotalMem_v2(size_t *s, int d) { (void)d; *s = 1 << 30; return OK; }
R cuDeviceGetPCIBusId(char *b, int len, int d) { snprintf(b, len, "FFFF:1%X:00.0", d); return OK; }
R cuDeviceGetUuid(unsigned char *u, int d) { memset(u, d + 1, 16); return OK; }
R cuDeviceGetUuid_v2(unsigned char *u, int d) {
    memset(u, d + 1, 16);
#ifdef MIG
    u[0] = 0xaa;
#endif
    return OK;
}
R cuDevicePrimaryCtxRetain(void **c, int d) { n.retains++; *c = (void *)(intptr_t)(d + 1); return OK; }
R cuDevicePrimaryCtxRelease_v2(int d) { (void)d; n.releases++; return OK; }
R cuCtxPushCurrent_v2(void *c) { stack[depth++] = (int)(intptr_t)c - 1; return OK; }
R cuCtxPopCurrent_v2(void **c) {
    if (!depth) { violate("pop of an empty stack"); return NO_CONTEXT; }
    *c = (void *)(intptr_t)(stack[--depth] + 1);
    return OK;
}
R cuCtxGetStreamPriorityRange(int *least, int *greatest) { ENTER; *least = 0; *greatest = -5; return OK; }
R cuThreadExchangeStreamCaptureMode(int *m) { int old = mode; mode = *m; *m = old; return OK; }

R cuModuleLoadDataEx(void **m, const void *image, unsigned count, int *options, void **values) {
    ENTER;
    if (running()) violate("a module loaded while a kernel runs");
    int refused = !!strstr(image, "refuse me");
#ifdef WITHOUT_COPIES
    refused |= !!strstr(image, ".entry copies(");
#endif
    if (refused) {
        for (unsigned i = 0; i < count; i++)
            if (options[i] == 5) strcpy(values[i], "ptxas application ptx input, line 3; fatal: refused");
        return 218;
    }
    struct module *x = calloc(1, sizeof *x);
    x->text = strdup(image);
    *m = x;
    n.modules++;
    return OK;
}
R cuModuleUnload(struct module *m) { ENTER; if (running() || launch_count || staying) violate("a module unloaded while a kernel runs"); free(m->text); free(m); n.modules--; return OK; }
R cuModuleGetFunction(struct function **f, struct module *m, const char *name) {
    ENTER;
    char entry[80];
    snprintf(entry, sizeof entry, ".entry %s(", name);
    if (!strstr(m->text, entry)) return NOT_FOUND;
    *f = calloc(1, sizeof **f);
    snprintf((*f)->name, 64, "%s", name);
    return OK;
}
R cuFuncLoad(struct function *f) { ENTER; f->loaded = 1; return OK; }
R cuFuncGetAttribute(int *v, int a, struct function *f) { ENTER; (void)f; *v = a == 0 ? 512 : a == 4 ? 32 : 0; return OK; }
R cuOccupancyMaxActiveBlocksPerMultiprocessor(int *b, struct function *f, int threads, size_t shared) { ENTER; (void)f; (void)shared; *b = 2048 / threads; return OK; }
R cuLaunchKernel(struct function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                 struct stream *s, void **args, void **extra) {
    ENTER;
    (void)gx; (void)gy; (void)gz; (void)bx; (void)by; (void)bz; (void)shared; (void)extra;
    if (!s) violate("a launch on the legacy stream");
    if (!f->loaded && running()) violate("a kernel loaded lazily while another runs");
    uint64_t *p = (uint64_t *)*(P *)args[0];
    if (!strcmp(f->name, "copies")) {
        if (gx != 1 || bx < 64 || bx > 288 || bx % 32) violate("the copies' kernel in another shape");
        if (!find((P)p) || launch_count == 64) return INVALID;
        n.launches++;
        uint64_t *word[5];
        memcpy(word, args, sizeof word);
        for (int i = 0; i < launch_count; i++)
            if (launches[i].board == p) violate("two launches of one board");
        launches[launch_count++] = (struct launch){p, *word[1], {*word[2], *word[3]}, *word[4] & 0xffffffff, *word[4] >> 32, 0, stack[depth - 1], 0, s, 0};
        run_launches();
        if (launch_us) { /* others go on */
            pthread_mutex_unlock(&lock);
            usleep(launch_us);
            pthread_mutex_lock(&lock);
        }
        return OK;
    }
    if (!find((P)p)) violate("parameters outside device memory");
    if (!strcmp(f->name, "store")) *(uint64_t *)p[0] = p[1];
    else if (!strcmp(f->name, "spin")) { s->wait_flag = p[0]; kernels[kernel_count++] = p[0]; }
    else if (!strcmp(f->name, "fault")) sticky = 1;
    else return INVALID;
    return OK;
}

R cuStreamCreateWithPriority(struct stream **s, unsigned flags, int priority) {
    ENTER;
    if (flags != 1) violate("a stream that blocks with the legacy stream");
    *s = calloc(1, sizeof **s);
    (*s)->priority = priority;
    n.streams++;
    return OK;
}
R cuStreamDestroy_v2(struct stream *s) { ENTER; free(s); n.streams--; return OK; }
R cuEventCreate(struct event **e, unsigned flags) { ENTER; (void)flags; *e = calloc(1, sizeof **e); n.events++; return OK; }
R cuEventDestroy_v2(struct event *e) { ENTER; free(e); n.events--; return OK; }
R cuEventRecord(struct event *e, struct stream *s) {
    ENTER;
    if (!s) violate("an event on the legacy stream");
    e->recorded = 1;
    e->stream = s;
    for (int i = 0; i < launch_count; i++)
        if (launches[i].stream == s && ++launches[i].records == 512) violate("more than the driver's queue takes without waiting");
    e->wait_flag = s->wait_flag;
    if (s->priority < 0 && !hold_copies_release) e->wait_flag = (P)&hold_copies_release;
    return OK;
}
R cuEventQuery(struct event *e) {
    ENTER;
    for (int i = 0; i < launch_count; i++)
        if (e->recorded && launches[i].stream == e->stream) return NOT_READY;
    return e->wait_flag && *(volatile uint64_t *)e->wait_flag == 0 ? NOT_READY : OK;
}
R cuEventElapsedTime(float *ms, struct event *a, struct event *b) { ENTER; if (!a->recorded || !b->recorded) return INVALID; *ms = 1.5f; return OK; }

R cuMemAlloc_v2(P *p, size_t size) {
    ENTER;
    n.allocs++;
    if (size > 1 << 30) return 2;
    *p = map(0, size, memory(size), 0);
    memset((void *)*p, 0xcd, size);
    return OK;
}
R cuMemFree_v2(P p) {
    ENTER;
    struct range *b = find(p);
    R r = gone(p, "memory freed while a kernel runs");
    if (!r) { munmap((void *)p, b->size); close(b->fd); }
    return r;
}
R cuMemHostAlloc(void **p, size_t size, unsigned flags) {
    ENTER;
    if (flags != 3) violate("pinned memory without portable and devicemap");
    n.allocs++;
    *p = block(size);
    memset(*p, 0xcd, size);
    add((P)*p, size, 1);
    return OK;
}
R cuMemFreeHost(void *p) { ENTER; R r = gone((P)p, "pinned memory freed while a kernel runs"); if (!r) free(p); return r; }
R cuMemHostGetDevicePointer_v2(P *d, void *p, unsigned flags) { ENTER; (void)flags; *d = (P)p; return find((P)p) ? OK : INVALID; }
R cuMemHostRegister_v2(void *p, size_t size, unsigned flags) {
    ENTER;
    (void)flags;
    struct range *r = find((P)p);
    if (r) return r->registered ? 712 : INVALID; /* what it allocated itself is invalid, as the driver has it */
    add((P)p, size, 1);
    find((P)p)->registered = 1;
    return OK;
}
R cuMemHostUnregister(void *p) { ENTER; return gone((P)p, "memory unregistered while a kernel runs"); }

/* Wholly in memory: in one range, or in mappings side by side. */
static int inside(P at, size_t size) {
    for (struct range *r = find(at); r; at = r->start + r->size, r = find(at)) {
        size_t here = r->start + r->size - at;
        if (here >= size) return 1;
        if (!r->vmm) return 0;
        size -= here;
    }
    return 0;
}

static R copy(P d, P s, size_t size, struct stream *st) {
    struct range *a = find(d), *b = find(s);
    if (!st) violate("a copy on the legacy stream");
    if (!inside(d, size) || !inside(s, size)) { violate("a copy outside memory"); return INVALID; }
    if (a->type == 2 && b->type == 2 && a->device == b->device) violate("a copy within one GPU");
    if (a->type == 1 && b->type == 1) violate("a copy from host to host");
    memcpy((void *)d, (void *)s, size);
    n.copies++;
    return OK;
}
R cuMemcpyAsync(P d, P s, size_t size, struct stream *st) { ENTER; return copy(d, s, size, st); }

struct attributes { int order, src[2], dst[2]; unsigned flags; };
static R batch(const P *d, const P *s, const size_t *size, size_t count, struct attributes *a, size_t *first, size_t attrs, struct stream *st) {
    if (count == 0 || attrs != 1 || *first != 0 || a->order != 1) return INVALID;
    n.batches++;
    n.batched_copies += count;
    const char *pause = getenv("MOCK_BATCH_US"); /* between its copies, for who must not see them apart */
    for (size_t i = count; i-- > 0;) {
        R r = copy(d[i], s[i], size[i], st);
        if (r) return r;
        if (pause && i) usleep(atoi(pause));
    }
    return OK;
}
#if BATCH >= 1
R cuMemcpyBatchAsync(P *d, P *s, size_t *size, size_t count, struct attributes *a, size_t *first, size_t attrs, size_t *fail, struct stream *st) {
    ENTER;
    if (BATCH >= 2) violate("the old batch call where there is a new one");
    *fail = ~0ul;
    return batch(d, s, size, count, a, first, attrs, st);
}
#endif
#if BATCH >= 2
R cuMemcpyBatchAsync_v2(const P *d, const P *s, const size_t *size, size_t count, struct attributes *a, size_t *first, size_t attrs, struct stream *st) {
    ENTER;
    return batch(d, s, size, count, a, first, attrs, st);
}
#endif
R cuCtxGetId(void *c, uint64_t *id) { *id = 1000 * (intptr_t)c + context_id; return OK; }
R cuCtxGetDevice(int *d) {
    if (!depth) return NO_CONTEXT;
    *d = stack[depth - 1];
    return OK;
}
R cuPointerGetAttributes(unsigned count, int *which, void **out, P p) {
    ENTER;
    struct range *r = find(p);
    for (unsigned i = 0; i < count; i++) switch (which[i]) {
        case 1: *(uintptr_t *)out[i] = !r || r->vmm || r->owner >= 2 ? 0 : r->owner ? 99 : r->device + 1; break;
        case 17: *(uintptr_t *)out[i] = r && r->owner >= 2 ? r->owner : 0; break;
        case 2: *(unsigned *)out[i] = r ? r->type : 0; break;
        case 3: *(P *)out[i] = r ? p : 0; break;
        case 8: *(unsigned *)out[i] = 0; break;
        case 9: *(int *)out[i] = r ? r->device : -2; break;
        /* Of mapped memory, the reserved range around it. */
        case 11: *(P *)out[i] = r ? r->start - r->pad : 0; break;
        case 12: *(size_t *)out[i] = r ? r->size + 2 * r->pad : 0; break;
        default: return INVALID;
    }
    return OK;
}

R cuMemPoolGetAccess(int *flags, void *pool, const int *location) {
    ENTER;
    *flags = (uintptr_t)pool == 2 && location[0] == 1 && location[1] == 0 ? 3 : 0;
    return pool ? OK : INVALID;
}

/* Another process finds the memfd under the descriptors of this one. */
struct ipc { int pid, fd; size_t size; char rest[48]; };
R cuIpcGetMemHandle(struct ipc *h, P p) {
    ENTER;
    struct range *r = find(p);
    if (!r || r->fd < 0 || r->vmm) return INVALID;
    *h = (struct ipc){getpid(), r->fd, r->size, ""};
    return OK;
}
R cuIpcOpenMemHandle_v2(P *p, struct ipc h, unsigned flags) {
    ENTER;
    (void)flags;
    if (h.pid == getpid() && getenv("MOCK_IPC_ELSEWHERE")) return NO_CONTEXT; /* as the driver does */
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    return fd >= 0 && (*p = map(0, h.size, fd, 0)) ? OK : INVALID;
}
R cuIpcCloseMemHandle(P p) { ENTER; return gone(p, "an import closed while a kernel runs"); }

struct prop { int kind, handles, location[2]; void *w; unsigned char flags[8]; };
R cuMemGetAllocationGranularity(size_t *g, const struct prop *p, int option) { ENTER; (void)option; *g = 2 << 20; return p->kind == 1 ? OK : INVALID; }
/* A handle is a descriptor, one up: 0 is none. */
R cuMemCreate(P *h, size_t size, const struct prop *p, uint64_t flags) {
    ENTER;
    if (size % (2 << 20) || p->kind != 1 || p->handles != 1 || p->location[0] != 1 || flags) return INVALID;
    *h = memory(size) + 1;
    return OK;
}
R cuMemRetainAllocationHandle(P *h, void *at) {
    ENTER;
    struct range *r = find((P)at);
#ifdef NO_HANDLES
    return INVALID;
#endif
    if (!r || !r->vmm) return INVALID;
    r->refs++;
    *h = r->fd + 1;
    return OK;
}
R cuMemRelease(P h) {
    ENTER;
    for (int i = 0; i < range_count; i++)
        if (ranges[i].live && ranges[i].fd == (int)h - 1 && ranges[i].refs) { ranges[i].refs--; return OK; }
    return close((int)h - 1) ? INVALID : OK;
}
/* The heap's descriptor serves as a dma-buf: it begins where the memory does. */
R cuMemGetHandleForAddressRange(void *out, P p, size_t size, int type, uint64_t flags) {
    ENTER;
    struct range *r = find(p);
    if (type != 1 || flags || p % 4096 || size % 4096) { violate("a dma-buf of parts of pages"); return INVALID; }
    if (!r || r->fd < 0 || p != r->start) return INVALID;
    return (*(int *)out = dup(r->fd)) >= 0 ? OK : INVALID;
}
R cuMemAddressReserve(P *p, size_t size, size_t align, P addr, uint64_t flags) {
    ENTER;
    (void)addr; (void)flags;
    P at = (P)mmap(0, size + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *p = (at + align - 1) & ~(P)(align - 1);
    return OK;
}
R cuMemAddressFree(P p, size_t size) { ENTER; return munmap((void *)p, size) ? INVALID : OK; }
R cuMemMap(P p, size_t size, size_t offset, P h, uint64_t flags) {
    ENTER;
    (void)flags;
    struct stat st;
    if (offset || fstat((int)h - 1, &st) || size > (size_t)st.st_size) return INVALID;
    n.maps++;
    return map(p, size, dup((int)h - 1), 1) ? OK : INVALID;
}
#ifndef WITHOUT_UNMAP
R cuMemUnmap(P p, size_t size) {
    ENTER;
    struct range *r = find(p);
    if (r && r->fd >= 0) close(r->fd);
    mmap((void *)p, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    n.maps--;
    return gone(p, "memory unmapped while a kernel runs");
}
#endif
R cuMemSetAccess(P p, size_t size, const int *desc, size_t count) {
    ENTER;
    (void)size;
    return find(p) && count == 1 && desc[0] == 1 && desc[2] == 3 ? OK : INVALID;
}
R cuMemGetAccess(uint64_t *flags, const int *location, P p) {
    ENTER;
    struct range *r = find(p);
    if (!r || !r->vmm || location[0] != 1) return INVALID;
    *flags = r->device == location[1] ? 3 : 0;
    return OK;
}
R cuMemExportToShareableHandle(void *out, P h, int type, uint64_t flags) { ENTER; (void)flags; *(int *)out = dup((int)h - 1); return type == 1 ? OK : INVALID; }
R cuMemImportFromShareableHandle(P *h, void *fd, int type) { ENTER; *h = dup((int)(intptr_t)fd) + 1; return type == 1 && *h ? OK : INVALID; }
