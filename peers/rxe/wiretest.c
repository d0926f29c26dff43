/* wiretest: scripted verbs client/server that puts every interesting RoCEv2 packet
 * on the wire, in a fixed order, between two devices (or an rxe device and a foreign
 * user-space implementation).
 *
 *   server: wiretest DEV GIDX                 (listens on TCP 18600)
 *   client: wiretest DEV GIDX SERVER_IP [PORT]
 *
 * QP exchange is one text line each way, per QP:
 *   "TYPE QPN PSN RKEY VADDR LEN GID\n"  (hex, GID as 32 hex digits)
 * Two QPs are made, in this order: RC then UC.  After each step the client prints
 * "step NAME status=.. opcode=.. byte_len=.." from the CQE.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define BUFSZ (1 << 16)
#define DIE(...)                                                                                                                           \
    do {                                                                                                                                   \
        fprintf(stderr, __VA_ARGS__);                                                                                                      \
        fprintf(stderr, " (errno %d %s)\n", errno, strerror(errno));                                                                       \
        exit(1);                                                                                                                           \
    } while (0)

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static uint8_t *buf;
static int gidx;
static union ibv_gid gid;

struct peer {
    unsigned qpn, psn, rkey;
    unsigned long long va;
    unsigned len;
    union ibv_gid gid;
};

static struct ibv_qp *mkqp(enum ibv_qp_type t) {
    struct ibv_qp_init_attr a = {
        .send_cq = cq,
        .recv_cq = cq,
        .qp_type = t,
        .sq_sig_all = 1,
        .cap = {.max_send_wr = 64, .max_recv_wr = 64, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 64}};
    struct ibv_qp *q = ibv_create_qp(pd, &a);
    if (!q)
        DIE("create_qp");
    struct ibv_qp_attr m = {.qp_state = IBV_QPS_INIT,
                            .port_num = 1,
                            .qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                                               (t == IBV_QPT_RC ? IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC : 0)};
    if (ibv_modify_qp(q, &m, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
        DIE("INIT");
    return q;
}

static void connect_qp(struct ibv_qp *q, enum ibv_qp_type t, unsigned mypsn, struct peer *p) {
    struct ibv_qp_attr m = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = IBV_MTU_1024,
        .dest_qp_num = p->qpn,
        .rq_psn = p->psn,
        .max_dest_rd_atomic = 4,
        .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = p->gid, .sgid_index = gidx, .hop_limit = 64, .traffic_class = 0x68}}};
    int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    if (t == IBV_QPT_RC)
        mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    if (ibv_modify_qp(q, &m, mask))
        DIE("RTR");
    struct ibv_qp_attr s = {.qp_state = IBV_QPS_RTS, .sq_psn = mypsn, .timeout = 17, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4};
    mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
    if (t == IBV_QPT_RC)
        mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    if (ibv_modify_qp(q, &s, mask))
        DIE("RTS");
}

static FILE *sk;
static void xchg(const char *t, struct ibv_qp *q, unsigned psn, struct peer *p) {
    char g[33], line[256], ty[8];
    for (int i = 0; i < 16; i++)
        sprintf(g + 2 * i, "%02x", gid.raw[i]);
    fprintf(sk, "%s %x %x %x %llx %x %s\n", t, q->qp_num, psn, mr->rkey, (unsigned long long)(uintptr_t)buf, BUFSZ, g);
    fflush(sk);
    if (!fgets(line, sizeof line, sk))
        DIE("peer line");
    if (sscanf(line, "%7s %x %x %x %llx %x %32s", ty, &p->qpn, &p->psn, &p->rkey, &p->va, &p->len, g) != 7)
        DIE("parse %s", line);
    for (int i = 0; i < 16; i++) {
        unsigned v;
        sscanf(g + 2 * i, "%2x", &v);
        p->gid.raw[i] = v;
    }
    printf("peer %s", line);
}

static struct ibv_wc poll1(const char *what, int ms) {
    struct ibv_wc w;
    memset(&w, 0, sizeof w);
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (;;) {
        int n = ibv_poll_cq(cq, 1, &w);
        if (n < 0)
            DIE("poll");
        if (n) {
            printf("step %-14s status=%d(%s) opcode=%d byte_len=%u imm=%x flags=%x qpn=%x vendor_err=%x\n", what, w.status,
                   ibv_wc_status_str(w.status), w.opcode, w.byte_len, (w.wc_flags & IBV_WC_WITH_IMM) ? ntohl(w.imm_data) : 0, w.wc_flags,
                   w.qp_num, w.vendor_err);
            fflush(stdout);
            return w;
        }
        clock_gettime(CLOCK_MONOTONIC, &b);
        if ((b.tv_sec - a.tv_sec) * 1000 + (b.tv_nsec - a.tv_nsec) / 1000000 > ms) {
            printf("step %-14s TIMEOUT\n", what);
            fflush(stdout);
            w.status = -1;
            return w;
        }
    }
}

static void precv(struct ibv_qp *q, int n) {
    for (int i = 0; i < n; i++) {
        struct ibv_sge s = {(uintptr_t)buf + 49152 + i * 2048, 2048, mr->lkey};
        struct ibv_recv_wr w = {.wr_id = i, .sg_list = &s, .num_sge = 1}, *bad;
        if (ibv_post_recv(q, &w, &bad))
            DIE("post_recv");
    }
}

static struct ibv_wc op(const char *name, struct ibv_qp *q, struct peer *p, enum ibv_wr_opcode o, unsigned off, unsigned len, unsigned roff,
                        unsigned flags, uint64_t a0, uint64_t a1, unsigned rkey) {
    struct ibv_sge s = {(uintptr_t)buf + off, len, mr->lkey};
    struct ibv_send_wr w = {.sg_list = &s,
                            .num_sge = len ? 1 : 0,
                            .opcode = o,
                            .send_flags = IBV_SEND_SIGNALED | flags,
                            .imm_data = htonl(0xCAFE0001)},
                       *bad;
    if (o == IBV_WR_ATOMIC_CMP_AND_SWP || o == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        w.wr.atomic.remote_addr = p->va + roff;
        w.wr.atomic.rkey = rkey;
        w.wr.atomic.compare_add = a0;
        w.wr.atomic.swap = a1;
    } else {
        w.wr.rdma.remote_addr = p->va + roff;
        w.wr.rdma.rkey = rkey;
    }
    if (ibv_post_send(q, &w, &bad))
        DIE("post_send %s", name);
    return poll1(name, 8000);
}

int main(int argc, char **argv) {
    if (argc < 3)
        return 2;
    gidx = atoi(argv[2]);
    struct ibv_device **l = ibv_get_device_list(NULL);
    int i;
    for (i = 0; l && l[i]; i++)
        if (!strcmp(ibv_get_device_name(l[i]), argv[1]))
            break;
    if (!l || !l[i])
        DIE("no device %s", argv[1]);
    if (!(ctx = ibv_open_device(l[i])))
        DIE("open");
    if (!(pd = ibv_alloc_pd(ctx)))
        DIE("pd");
    if (!(cq = ibv_create_cq(ctx, 256, NULL, NULL, 0)))
        DIE("cq");
    if (ibv_query_gid(ctx, 1, gidx, &gid))
        DIE("gid");
    if (posix_memalign((void **)&buf, 4096, BUFSZ))
        DIE("mem");
    for (i = 0; i < BUFSZ; i++)
        buf[i] = argc > 3 ? i : 0x5a; /* client: counting bytes; server: 0x5a */
    mr = ibv_reg_mr(pd, buf, BUFSZ, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
    if (!mr)
        DIE("mr");
    struct ibv_qp *rc = mkqp(IBV_QPT_RC), *uc = mkqp(IBV_QPT_UC);
    int server = argc == 3, fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in sa = {.sin_family = AF_INET, .sin_port = htons(argc > 4 ? atoi(argv[4]) : 18600)};
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (server) {
        if (bind(fd, (void *)&sa, sizeof sa) || listen(fd, 1))
            DIE("listen");
        fd = accept(fd, NULL, NULL);
    } else {
        inet_pton(AF_INET, argv[3], &sa.sin_addr);
        for (i = 0; connect(fd, (void *)&sa, sizeof sa); i++) {
            if (i > 100)
                DIE("connect");
            close(fd);
            usleep(200000);
            fd = socket(AF_INET, SOCK_STREAM, 0);
        }
    }
    sk = fdopen(fd, "r+");
    setvbuf(sk, NULL, _IONBF, 0);
    unsigned psn = server ? 0x00BEEF : 0xFFFFFA; /* client PSN wraps after 6 packets */
    struct peer prc, puc;
    char line[64];
    xchg("RC", rc, psn, &prc);
    xchg("UC", uc, 0x000100, &puc);
    connect_qp(rc, IBV_QPT_RC, psn, &prc);
    connect_qp(uc, IBV_QPT_UC, 0x000100, &puc);
    if (server) {
        precv(rc, 5);
        precv(uc, 3);
        *(uint64_t *)(buf + 8192) = 100;
    }
    fprintf(sk, "ready\n");
    if (!fgets(line, sizeof line, sk))
        DIE("ready");
    if (server) {
        const char *rn[] = {"rc-send", "rc-send-imm", "rc-send-1600", "rc-write-imm", "rc-send-inl"};
        for (i = 0; i < 5; i++)
            poll1(rn[i], 30000);
        if (!fgets(line, sizeof line, sk))
            DIE("sync");
        poll1("uc-write-imm", 3000);
        poll1("uc-send", 3000);
        /* RNR: client sends with no receive posted; server waits 25 ms then posts one */
        if (!fgets(line, sizeof line, sk))
            DIE("sync2");
        usleep(25000);
        precv(rc, 1);
        poll1("rc-rnr-recv", 8000);
        printf("mem[0]=%02x mem[4096..]=%02x%02x atomic=%llx uc[12288]=%02x\n", buf[0], buf[4096], buf[4097],
               (unsigned long long)*(uint64_t *)(buf + 8192), buf[12288]);
        if (!fgets(line, sizeof line, sk))
            return 0;
        return 0;
    }
    op("rc-write-8", rc, &prc, IBV_WR_RDMA_WRITE, 0, 8, 0, 0, 0, 0, prc.rkey);
    op("rc-write-0", rc, &prc, IBV_WR_RDMA_WRITE, 0, 0, 0, 0, 0, 0, prc.rkey);
    op("rc-write-inl5", rc, &prc, IBV_WR_RDMA_WRITE, 3, 5, 64, IBV_SEND_INLINE, 0, 0, prc.rkey);
    op("rc-write-2600", rc, &prc, IBV_WR_RDMA_WRITE, 0, 2600, 4096, 0, 0, 0, prc.rkey);
    op("rc-read-64", rc, &prc, IBV_WR_RDMA_READ, 16384, 64, 4096, 0, 0, 0, prc.rkey);
    op("rc-read-2600", rc, &prc, IBV_WR_RDMA_READ, 16384, 2600, 4096, 0, 0, 0, prc.rkey);
    printf("read back %s\n", memcmp(buf + 16384, buf, 2600) ? "MISMATCH" : "ok");
    op("rc-fetch-add", rc, &prc, IBV_WR_ATOMIC_FETCH_AND_ADD, 20480, 8, 8192, 0, 0x1122334455667788ull, 0, prc.rkey);
    printf("fa old=%llx\n", (unsigned long long)*(uint64_t *)(buf + 20480));
    op("rc-cmp-swap", rc, &prc, IBV_WR_ATOMIC_CMP_AND_SWP, 20480, 8, 8192, 0, 0x11223344556677ecull, 0xA5A5, prc.rkey);
    printf("cs old=%llx\n", (unsigned long long)*(uint64_t *)(buf + 20480));
    op("rc-cmp-swap-f", rc, &prc, IBV_WR_ATOMIC_CMP_AND_SWP, 20480, 8, 8192, 0, 0xdead, 0xbeef, prc.rkey);
    printf("cs(fail) old=%llx\n", (unsigned long long)*(uint64_t *)(buf + 20480));
    op("rc-send", rc, &prc, IBV_WR_SEND, 0, 32, 0, 0, 0, 0, 0);
    op("rc-send-imm", rc, &prc, IBV_WR_SEND_WITH_IMM, 0, 33, 0, IBV_SEND_SOLICITED, 0, 0, 0);
    op("rc-send-1600", rc, &prc, IBV_WR_SEND, 0, 1600, 0, 0, 0, 0, 0);
    op("rc-write-imm", rc, &prc, IBV_WR_RDMA_WRITE_WITH_IMM, 0, 16, 128, 0, 0, 0, prc.rkey);
    op("rc-send-inl", rc, &prc, IBV_WR_SEND, 0, 7, 0, IBV_SEND_INLINE, 0, 0, 0);
    /* a batch of 8 writes, one post: shows ack coalescing */
    {
        struct ibv_sge s = {(uintptr_t)buf, 16, mr->lkey};
        struct ibv_send_wr w[8], *bad;
        memset(w, 0, sizeof w);
        for (i = 0; i < 8; i++) {
            w[i].sg_list = &s;
            w[i].num_sge = 1;
            w[i].opcode = IBV_WR_RDMA_WRITE;
            w[i].wr.rdma.remote_addr = prc.va + 256;
            w[i].wr.rdma.rkey = prc.rkey;
            w[i].send_flags = IBV_SEND_SIGNALED;
            w[i].next = i < 7 ? &w[i + 1] : NULL;
        }
        if (ibv_post_send(rc, w, &bad))
            DIE("batch");
        for (i = 0; i < 8; i++)
            poll1("rc-batch", 8000);
    }
    op("rc-write-16k", rc, &prc, IBV_WR_RDMA_WRITE, 0, 16384, 16384, 0, 0, 0, prc.rkey);
    fprintf(sk, "sync\n");
    op("uc-write", uc, &puc, IBV_WR_RDMA_WRITE, 0, 2100, 12288, 0, 0, 0, puc.rkey);
    op("uc-write-imm", uc, &puc, IBV_WR_RDMA_WRITE_WITH_IMM, 0, 48, 12288, 0, 0, 0, puc.rkey);
    op("uc-send", uc, &puc, IBV_WR_SEND, 0, 24, 0, 0, 0, 0, 0);
    fprintf(sk, "sync2\n");
    op("rc-rnr-send", rc, &prc, IBV_WR_SEND, 0, 12, 0, 0, 0, 0, 0);
    op("rc-bad-rkey", rc, &prc, IBV_WR_RDMA_WRITE, 0, 8, 0, 0, 0, 0, prc.rkey ^ 0x5500);
    op("rc-flushed", rc, &prc, IBV_WR_RDMA_WRITE, 0, 8, 0, 0, 0, 0, prc.rkey);
    fprintf(sk, "bye\n");
    return 0;
}
