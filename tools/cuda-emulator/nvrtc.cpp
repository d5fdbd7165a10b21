// NVRTC's interface over the host's compiler: a "cubin" is a shared library with a wrapper for every kernel.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <unistd.h>
#include <vector>

namespace {

struct Program {
    std::string source, name, header, header_name, log, cubin;
};

std::string read(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// The folder with translate.py and lanes.h, given when this is built.
const std::string FOLDER = EMULATOR_FOLDER;

}  // namespace

extern "C" {

int nvrtcVersion(int* major, int* minor) {
    *major = 13, *minor = 99;
    return 0;
}

const char* nvrtcGetErrorString(int status) { return status ? "the host's compiler failed" : "success"; }

int nvrtcCreateProgram(Program** out, const char* source, const char* name, int headers, const char* const* texts,
                       const char* const* names) {
    *out = new Program{source, name, headers ? texts[0] : "", headers ? names[0] : "", "", ""};
    return 0;
}

int nvrtcCompileProgram(Program* p, int count, const char* const* options) {
    std::string folder = (std::filesystem::temp_directory_path() / "cuda-emulator-XXXXXX").string();
    if (!mkdtemp(folder.data())) return 7;
    const std::filesystem::path at = folder;
    std::ofstream(at / p->name) << p->source;
    std::ofstream(at / "header") << p->header;
    std::string flags;
    for (int i = 0; i < count; i++) {
        const std::string option = options[i];
        const std::string macro = "--define-macro=", arch = "--gpu-architecture=sm_";
        if (option.starts_with(macro)) flags += " -D" + option.substr(macro.size());
        if (option.starts_with(arch)) {
            const std::string card = option.substr(arch.size());
            flags += " -D__CUDA_ARCH__=" + std::to_string(10 * std::stoi(card));
            if (card.ends_with("a")) flags += " -D__CUDA_ARCH_FEAT_SM90_ALL";
        }
    }
    const std::string compile = "{ python3 '" + FOLDER + "/translate.py' '" + (at / p->name).string() + "' '" + (at / "header").string() +
                                "' '" + (at / "out.cpp").string() + "' && ${CXX:-g++} -std=c++20 -O1 -march=native -ffp-contract=off -w -shared -fPIC "
                                "-fvisibility=hidden -fno-gnu-unique -fno-strict-aliasing ${CUDA_EMULATOR_FLAGS:-}" + flags + " -I'" + FOLDER + "' '" +
                                (at / "out.cpp").string() + "' -o '" + (at / "out.so").string() + "'; } > '" + (at / "log").string() + "' 2>&1";
    const int status = std::system(compile.c_str());
    p->log = read(at / "log");
    p->cubin = status ? "" : read(at / "out.so");
    std::filesystem::remove_all(at);
    return status ? 6 : 0;
}

int nvrtcGetProgramLogSize(Program* p, size_t* n) {
    *n = p->log.size() + 1;
    return 0;
}
int nvrtcGetProgramLog(Program* p, char* to) {
    memcpy(to, p->log.c_str(), p->log.size() + 1);
    return 0;
}
int nvrtcGetCUBINSize(Program* p, size_t* n) {
    *n = p->cubin.size();
    return 0;
}
int nvrtcGetCUBIN(Program* p, char* to) {
    memcpy(to, p->cubin.data(), p->cubin.size());
    return 0;
}
int nvrtcDestroyProgram(Program** p) {
    delete *p;
    *p = nullptr;
    return 0;
}
}
