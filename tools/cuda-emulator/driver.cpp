// The calls of the CUDA driver that this repository makes, over the host: memory of the card is memory of the host, a
// module is a shared library, a launch runs at once. One card, whose architecture CUDA_EMULATOR_ARCH says (80 unless told).
//
// What a card would refuse is refused: more shared memory than was asked for, copies while a stream is recorded, more memory
// than CUDA_EMULATOR_MEMORY bytes (4 GiB unless told). The file CUDA_EMULATOR_TAKEN says how many of them other processes have,
// whenever that changes.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

namespace {

enum { SUCCESS = 0, INVALID = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, CAPTURING = 900, BAD_IMAGE = 200 };
using Status = int;

size_t setting(const char* name, size_t otherwise) {
    const char* v = getenv(name);
    return v ? strtoull(v, nullptr, 10) : otherwise;
}
size_t arch() { return setting("CUDA_EMULATOR_ARCH", 80); }
size_t total() { return setting("CUDA_EMULATOR_MEMORY", size_t(4) << 30); }

size_t taken() {
    const char* path = getenv("CUDA_EMULATOR_TAKEN");
    FILE* file = path ? fopen(path, "r") : nullptr;
    unsigned long long bytes = 0;
    if (file && fscanf(file, "%llu", &bytes) != 1) bytes = 0;
    if (file) fclose(file);
    return bytes;
}

std::recursive_mutex one;
std::map<uintptr_t, size_t> memory;
size_t used;

size_t unused() {
    const size_t gone = used + taken();
    return gone < total() ? total() - gone : 0;
}

// What a recorded step takes on the card.
constexpr size_t GRAPH = 64 << 10;

struct Kernel {
    void (*run)(const void*, const unsigned*, const unsigned*);
    unsigned size;
    int shared;
};

struct Module {
    void* library;
    std::vector<Kernel*> kernels;
};

struct Launch {
    Kernel* kernel;
    unsigned grid[3], block[3];
    std::vector<char> params;
    void run() const { kernel->run(params.data(), grid, block); }
};

struct Graph {
    std::vector<Launch> launches;
};

Graph* capturing;

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) Status
#define LOCKED std::lock_guard<std::recursive_mutex> guard(one)
#define NOT_WHILE_CAPTURING \
    if (capturing) return CAPTURING

API cuInit(unsigned) { return SUCCESS; }
API cuDriverGetVersion(int* v) { *v = 13990; return SUCCESS; }
API cuDeviceGetCount(int* n) { *n = 1; return SUCCESS; }
API cuDeviceGet(int* d, int i) { *d = i; return i ? 101 : SUCCESS; }
API cuDeviceGetName(char* to, int n, int) { snprintf(to, n, "emulated card"); return SUCCESS; }
API cuDeviceTotalMem_v2(size_t* n, int) { *n = total(); return SUCCESS; }
API cuDeviceGetAttribute(int* v, int which, int) {
    switch (which) {
        case 97: *v = (arch() == 90 ? 227 : arch() == 80 ? 163 : 99) << 10; break;
        case 75: *v = arch() / 10; break;
        case 76: *v = arch() % 10; break;
        case 16: *v = 8; break;
        default: *v = 0;
    }
    return SUCCESS;
}
API cuDevicePrimaryCtxRetain(void** c, int) { *c = &one; return SUCCESS; }
API cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
API cuCtxGetCurrent(void** c) { *c = &one; return SUCCESS; }
API cuCtxSetCurrent(void*) { return SUCCESS; }
API cuCtxSynchronize() { return SUCCESS; }
API cuCtxGetStreamPriorityRange(int* a, int* b) { *a = *b = 0; return SUCCESS; }
API cuStreamCreate(void** s, unsigned) { *s = malloc(1); return SUCCESS; }
API cuStreamCreateWithPriority(void** s, unsigned, int) { *s = malloc(1); return SUCCESS; }
API cuStreamDestroy_v2(void* s) { free(s); return SUCCESS; }
API cuStreamSynchronize(void*) { NOT_WHILE_CAPTURING; return SUCCESS; }
API cuStreamWaitEvent(void*, void*, unsigned) { return SUCCESS; }
API cuEventCreate(void** e, unsigned) { *e = malloc(1); return SUCCESS; }
API cuEventDestroy_v2(void* e) { free(e); return SUCCESS; }
API cuEventRecord(void*, void*) { return SUCCESS; }
API cuEventQuery(void*) { return SUCCESS; }
API cuEventSynchronize(void*) { return SUCCESS; }
API cuEventElapsedTime_v2(float* ms, void*, void*) { *ms = 1; return SUCCESS; }
API cuEventElapsedTime(float* ms, void*, void*) { *ms = 1; return SUCCESS; }

API cuMemAlloc_v2(uintptr_t* at, size_t n) {
    LOCKED;
    NOT_WHILE_CAPTURING;
    if (n == 0) return INVALID;
    if (n > unused()) return OUT_OF_MEMORY;
    void* p = aligned_alloc(512, (n + 511) / 512 * 512);
    if (!p) return OUT_OF_MEMORY;
    memset(p, 0xff, n);
    *at = (uintptr_t)p, memory[*at] = n, used += n;
    return SUCCESS;
}
API cuMemFree_v2(uintptr_t at) {
    LOCKED;
    const auto found = memory.find(at);
    if (found == memory.end()) return INVALID;
    used -= found->second;
    memory.erase(found);
    free((void*)at);
    return SUCCESS;
}
API cuMemAllocAsync(uintptr_t* at, size_t n, void*) { return cuMemAlloc_v2(at, n); }
API cuMemFreeAsync(uintptr_t at, void*) { return cuMemFree_v2(at); }
API cuMemGetInfo_v2(size_t* free, size_t* all) { LOCKED; *all = total(), *free = unused(); return SUCCESS; }
API cuMemHostAlloc(void** p, size_t n, unsigned) { *p = malloc(n); return SUCCESS; }
API cuMemFreeHost(void* p) { free(p); return SUCCESS; }
API cuMemsetD8_v2(uintptr_t at, unsigned char v, size_t n) { NOT_WHILE_CAPTURING; memset((void*)at, v, n); return SUCCESS; }
API cuMemsetD8Async(uintptr_t at, unsigned char v, size_t n, void*) { return cuMemsetD8_v2(at, v, n); }
API cuMemcpyHtoD_v2(uintptr_t to, const void* from, size_t n) { NOT_WHILE_CAPTURING; memcpy((void*)to, from, n); return SUCCESS; }
API cuMemcpyHtoDAsync_v2(uintptr_t to, const void* from, size_t n, void*) { return cuMemcpyHtoD_v2(to, from, n); }
API cuMemcpyDtoH_v2(void* to, uintptr_t from, size_t n) { NOT_WHILE_CAPTURING; memcpy(to, (void*)from, n); return SUCCESS; }
API cuMemcpyDtoHAsync_v2(void* to, uintptr_t from, size_t n, void*) { return cuMemcpyDtoH_v2(to, from, n); }
API cuMemcpyDtoD_v2(uintptr_t to, uintptr_t from, size_t n) { NOT_WHILE_CAPTURING; memmove((void*)to, (void*)from, n); return SUCCESS; }
API cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t n, void*) { return cuMemcpyDtoD_v2(to, from, n); }

API cuModuleLoadData(Module** m, const void* image) {
    // The length of an ELF file: its section headers come last.
    const unsigned char* e = (const unsigned char*)image;
    if (memcmp(e, "\x7f" "ELF", 4)) return BAD_IMAGE;
    uint64_t sections;
    uint16_t each, count;
    memcpy(&sections, e + 0x28, 8), memcpy(&each, e + 0x3a, 2), memcpy(&count, e + 0x3c, 2);
    const size_t n = sections + size_t(each) * count;
    const int file = memfd_create("module", 0);
    if (file < 0 || write(file, image, n) != (ssize_t)n) return BAD_IMAGE;
    // The file stays open: the loader knows a library by its name, and the number is not given twice.
    void* library = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return BAD_IMAGE;
    }
    *m = new Module{library, {}};
    return SUCCESS;
}
API cuModuleUnload(Module* m) {
    for (Kernel* k : m->kernels) delete k;
    delete m;
    return SUCCESS;
}
API cuModuleGetFunction(Kernel** out, Module* m, const char* name) {
    LOCKED;
    void* run = dlsym(m->library, ("emulated_run_" + std::string(name)).c_str());
    void* size = dlsym(m->library, ("emulated_size_" + std::string(name)).c_str());
    if (!run || !size) return NOT_FOUND;
    *out = new Kernel{(decltype(Kernel::run))run, ((unsigned (*)())size)(), 48 << 10};
    m->kernels.push_back(*out);
    return SUCCESS;
}
API cuFuncSetAttribute(Kernel* k, int which, int v) {
    if (which == 8) k->shared = v;
    return SUCCESS;
}
API cuFuncGetAttribute(int* v, int, Kernel*) { *v = 0; return SUCCESS; }

struct Config {
    unsigned grid[3], block[3], shared;
    void* stream;
    void* attributes;
    unsigned count;
};
API cuLaunchKernelEx(const Config* c, Kernel* k, void** params, void**) {
    LOCKED;
    const unsigned threads = c->block[0] * c->block[1] * c->block[2];
    if ((int)c->shared > k->shared || threads == 0 || threads > 1024 || c->grid[1] > 65535 || c->grid[2] > 65535) {
        fprintf(stderr, "refused: %u x %u x %u blocks of %u threads with %u bytes of %d\n", c->grid[0], c->grid[1], c->grid[2], threads,
                c->shared, k->shared);
        return INVALID;
    }
    const char* p = (const char*)params[0];
    Launch l{k, {c->grid[0], c->grid[1], c->grid[2]}, {c->block[0], c->block[1], c->block[2]}, {p, p + k->size}};
    if (capturing)
        capturing->launches.push_back(std::move(l));
    else
        l.run();
    return SUCCESS;
}

API cuStreamBeginCapture_v2(void*, int) { LOCKED; capturing = new Graph; return SUCCESS; }
API cuStreamEndCapture(void*, Graph** g) { LOCKED; *g = capturing, capturing = nullptr; return SUCCESS; }
API cuStreamIsCapturing(void*, int* v) { *v = capturing ? 1 : 0; return SUCCESS; }
API cuGraphInstantiateWithFlags(Graph** out, Graph* g, unsigned long long) {
    LOCKED;
    if (GRAPH > unused()) return OUT_OF_MEMORY;
    *out = new Graph(*g), used += GRAPH;
    return SUCCESS;
}
API cuGraphUpload(Graph*, void*) { return SUCCESS; }
API cuGraphLaunch(Graph* g, void*) {
    LOCKED;
    for (const Launch& l : g->launches) l.run();
    return SUCCESS;
}
API cuGraphDestroy(Graph* g) { delete g; return SUCCESS; }
API cuGraphExecDestroy(Graph* g) { LOCKED; delete g, used -= GRAPH; return SUCCESS; }

API cuGetErrorName(int e, const char** s) {
    *s = e == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : e == CAPTURING ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" : "CUDA_ERROR";
    return SUCCESS;
}
API cuGetErrorString(int e, const char** s) {
    static thread_local char text[32];
    snprintf(text, sizeof text, "error %d", e);
    *s = e == OUT_OF_MEMORY ? "out of memory" : text;
    return SUCCESS;
}
