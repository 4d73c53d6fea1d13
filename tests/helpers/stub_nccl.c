/* NCCL's C interface between processes of one machine, over shared memory: it stands in for the collectives where there
   is no GPU. A collective is enqueued and ends later; a rank that does not come is waited for without end; ranks of
   different versions, numbers or types are refused. A stream is a number from 1 to 63; stub_stream_idle tells whether
   its work is done. STUB_NCCL_VERSION sets the version. Build: gcc -shared -fPIC -pthread -DDEFAULT_VERSION=22907. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };
enum { RANKS = 16, CHUNK = 1 << 16, STREAMS = 64 };
typedef struct { char name[128]; } UniqueId;
typedef struct { size_t size; unsigned magic, version; int blocking; } Config;

typedef struct {
    atomic_int joined, arrived[2];  /* of the two halves of a step */
    atomic_int ranks, versions[RANKS], mismatched;
    struct { size_t bytes; int root; } call;
    float sums[RANKS];
    char data[CHUNK];
} Shared;

typedef struct { int reduces; const char *send; char *recv; size_t bytes; int root, stream; } Call;

typedef struct {
    Shared *shared;
    int rank, size, steps[2], blocking;
    char name[128];
    atomic_int error, aborted;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Call calls[1024];
    unsigned first, last;
} Comm;

static atomic_int pending[STREAMS];
static atomic_int made;

int stub_stream_idle(long stream) { return atomic_load(&pending[stream % STREAMS]) == 0; }

static int version(void) {
    const char *given = getenv("STUB_NCCL_VERSION");
    return given ? atoi(given) : DEFAULT_VERSION;
}

int ncclGetVersion(int *out) { *out = version(); return SUCCESS; }

int ncclGetUniqueId(UniqueId *out) {
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "/stub_nccl_%d_%d", getpid(), atomic_fetch_add(&made, 1));
    return SUCCESS;
}

const char *ncclGetErrorString(int status) {
    return status == INVALID_USAGE ? "invalid usage" : status == INVALID_ARGUMENT ? "invalid argument" : "no error";
}

/* All ranks have come this far; 0 where this rank was aborted meanwhile. */
static int meet(Comm *comm, int half) {
    int goal = ++comm->steps[half] * comm->size;
    atomic_fetch_add(&comm->shared->arrived[half], 1);
    while (atomic_load(&comm->shared->arrived[half]) < goal) {
        if (atomic_load(&comm->aborted)) return 0;
        usleep(50);
    }
    return 1;
}

static int run(Comm *comm, Call *call) {
    Shared *shared = comm->shared;
    if (comm->rank == call->root) { shared->call.bytes = call->bytes; shared->call.root = call->root; }
    if (call->reduces) shared->sums[comm->rank] = *(const float *)call->send;
    if (!meet(comm, 0)) return 0;
    if (shared->call.bytes != call->bytes || shared->call.root != call->root) atomic_store(&shared->mismatched, 1);
    if (!meet(comm, 1)) return 0;
    if (atomic_load(&shared->mismatched)) { atomic_store(&comm->error, INVALID_USAGE); return 0; }
    if (call->reduces) {
        float total = 0;
        for (int rank = 0; rank < comm->size; rank++) total += shared->sums[rank];
        *(float *)call->recv = total;
        return meet(comm, 0) && meet(comm, 1);
    }
    for (size_t done = 0; done < call->bytes; done += CHUNK) {
        size_t part = call->bytes - done < CHUNK ? call->bytes - done : CHUNK;
        if (comm->rank == call->root) memcpy(shared->data, call->send + done, part);
        if (!meet(comm, 0)) return 0;
        if (comm->rank != call->root) memcpy(call->recv + done, shared->data, part);
        if (!meet(comm, 1)) return 0;
    }
    return 1;
}

static int join(Comm *comm) {
    int file = shm_open(comm->name, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, sizeof(Shared))) return INVALID_ARGUMENT;
    comm->shared = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (comm->rank >= comm->size || comm->size > RANKS) return INVALID_ARGUMENT;
    atomic_store(&comm->shared->versions[comm->rank], version());
    if (comm->rank == 0) atomic_store(&comm->shared->ranks, comm->size);
    atomic_fetch_add(&comm->shared->joined, 1);
    while (atomic_load(&comm->shared->joined) < comm->size) {
        if (atomic_load(&comm->aborted)) return INVALID_USAGE;
        usleep(100);
    }
    if (comm->rank == 0) shm_unlink(comm->name);
    for (int rank = 0; rank < comm->size; rank++)
        if (atomic_load(&comm->shared->versions[rank]) != version()) return INVALID_USAGE;
    return atomic_load(&comm->shared->ranks) == comm->size ? SUCCESS : INVALID_USAGE;
}

static void *work(void *argument) {
    Comm *comm = argument;
    atomic_store(&comm->error, join(comm));
    while (!atomic_load(&comm->aborted)) {
        pthread_mutex_lock(&comm->lock);
        while (comm->first == comm->last && !atomic_load(&comm->aborted)) pthread_cond_wait(&comm->changed, &comm->lock);
        Call call = comm->calls[comm->first % 1024];
        int any = comm->first != comm->last;
        comm->first += any;
        pthread_mutex_unlock(&comm->lock);
        if (any && atomic_load(&comm->error) == SUCCESS) run(comm, &call);
        if (any) atomic_fetch_sub(&pending[call.stream], 1);
    }
    return NULL;
}

int ncclCommInitRankConfig(Comm **out, int size, UniqueId id, int rank, Config *config) {
    if (config->magic != 0xcafebeef) return INVALID_ARGUMENT;
    Comm *comm = *out = calloc(1, sizeof *comm);
    comm->rank = rank, comm->size = size, comm->blocking = config->blocking;
    memcpy(comm->name, id.name, sizeof comm->name);
    atomic_store(&comm->error, IN_PROGRESS);
    pthread_mutex_init(&comm->lock, NULL);
    pthread_cond_init(&comm->changed, NULL);
    pthread_create(&comm->thread, NULL, work, comm);
    while (comm->blocking && atomic_load(&comm->error) == IN_PROGRESS) usleep(100);
    return atomic_load(&comm->error);
}

int ncclCommInitRank(Comm **out, int size, UniqueId id, int rank) {
    Config config = {sizeof config, 0xcafebeef, 21400, 1};
    return ncclCommInitRankConfig(out, size, id, rank, &config);
}

int ncclCommGetAsyncError(Comm *comm, int *out) { *out = atomic_load(&comm->error); return SUCCESS; }

static int enqueue(Comm *comm, Call call) {
    if (atomic_load(&comm->error) != SUCCESS) return INVALID_USAGE;
    atomic_fetch_add(&pending[call.stream], 1);
    pthread_mutex_lock(&comm->lock);
    comm->calls[comm->last++ % 1024] = call;
    pthread_cond_signal(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    return SUCCESS;
}

static size_t bytes_of(size_t count, int type) {
    static const int sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return count * sizes[type];
}

int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, Comm *comm, long stream) {
    return enqueue(comm, (Call){0, send, recv, bytes_of(count, type), root, stream % STREAMS});
}

int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, Comm *comm, long stream) {
    if (count != 1 || type != 7 || op != 0) return INVALID_ARGUMENT;  /* vLLM's warm-up: one float, summed */
    return enqueue(comm, (Call){1, send, recv, 4, 0, stream % STREAMS});
}

int ncclCommAbort(Comm *comm) {
    atomic_store(&comm->aborted, 1);
    pthread_mutex_lock(&comm->lock);
    for (; comm->first != comm->last; comm->first++) atomic_fetch_sub(&pending[comm->calls[comm->first % 1024].stream], 1);
    pthread_cond_signal(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    pthread_join(comm->thread, NULL);
    if (comm->rank == 0) shm_unlink(comm->name);
    if (comm->shared) munmap(comm->shared, sizeof(Shared));
    free(comm);
    return SUCCESS;
}

/* What vLLM's wrapper looks for and a refit does not use. */
#define UNUSED(name) int name(void) { return INVALID_USAGE; }
UNUSED(ncclReduce) UNUSED(ncclAllGather) UNUSED(ncclReduceScatter) UNUSED(ncclSend) UNUSED(ncclRecv)
UNUSED(ncclCommDestroy) UNUSED(ncclCommSuspend) UNUSED(ncclCommResume) UNUSED(ncclGroupStart) UNUSED(ncclGroupEnd)
UNUSED(ncclCommWindowRegister) UNUSED(ncclCommWindowDeregister) UNUSED(ncclCommQueryProperties)
