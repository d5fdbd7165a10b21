// What llama.cpp makes of a GGUF file: token ids of texts, logits of every position, greedy continuations.
//   llama_dump MODEL TEXTS OUT     TEXTS: texts that each end in a zero byte
// OUT, little-endian: for each text int32 n, n ids, int32 vocab, n * vocab float32 logits, int32 m, m greedy ids.
#include "llama.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace {

constexpr int GREEDY = 24;

[[noreturn]] void fail(const char *what) {
    std::fprintf(stderr, "llama_dump: %s\n", what);
    std::exit(1);
}

void put(std::ofstream &out, const void *data, size_t bytes) {
    out.write(static_cast<const char *>(data), static_cast<std::streamsize>(bytes));
}

void put(std::ofstream &out, int32_t value) { put(out, &value, sizeof value); }

std::vector<llama_token> tokenize(const llama_vocab *vocab, const std::string &text) {
    std::vector<llama_token> ids(text.size() + 16);
    const int n = llama_tokenize(vocab, text.data(), static_cast<int>(text.size()), ids.data(),
                                 static_cast<int>(ids.size()), true, true);
    if (n < 0) fail("a text has more tokens than bytes");
    ids.resize(static_cast<size_t>(n));
    return ids;
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 4) fail("expected MODEL TEXTS OUT");
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) fail("the model cannot be loaded");
    const llama_vocab *vocab = llama_model_get_vocab(model);
    const int width = llama_vocab_n_tokens(vocab);
    std::ifstream in(argv[2], std::ios::binary);
    const std::string all{std::istreambuf_iterator<char>(in), {}};
    std::ofstream out(argv[3], std::ios::binary);
    for (size_t at = 0; at < all.size();) {
        const size_t end = std::min(all.find('\0', at), all.size());
        const std::vector<llama_token> ids = tokenize(vocab, all.substr(at, end - at));
        at = end + 1;
        llama_context_params params = llama_context_default_params();
        params.n_ctx = static_cast<uint32_t>(ids.size() + GREEDY + 8);
        params.n_batch = params.n_ubatch = params.n_ctx;
        // Float caches and no flash attention: as little rounding as this library offers.
        params.type_k = params.type_v = GGML_TYPE_F32;
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
        llama_context *context = llama_init_from_model(model, params);
        if (!context) fail("no context");
        llama_batch batch = llama_batch_init(static_cast<int32_t>(ids.size()) + 1, 0, 1);
        const auto run = [&](const std::vector<llama_token> &tokens, int first) {
            batch.n_tokens = static_cast<int32_t>(tokens.size());
            for (size_t i = 0; i < tokens.size(); ++i) {
                batch.token[i] = tokens[i];
                batch.pos[i] = first + static_cast<int>(i);
                batch.n_seq_id[i] = 1;
                batch.seq_id[i][0] = 0;
                batch.logits[i] = 1;
            }
            if (llama_decode(context, batch) != 0) fail("decoding failed");
        };
        put(out, static_cast<int32_t>(ids.size()));
        put(out, ids.data(), ids.size() * sizeof ids[0]);
        put(out, width);
        if (ids.empty()) {
            put(out, 0);
            continue;
        }
        run(ids, 0);
        for (size_t i = 0; i < ids.size(); ++i) {
            put(out, llama_get_logits_ith(context, static_cast<int32_t>(i)), sizeof(float) * static_cast<size_t>(width));
        }
        put(out, GREEDY);
        const float *last = llama_get_logits_ith(context, static_cast<int32_t>(ids.size()) - 1);
        for (int i = 0; i < GREEDY; ++i) {
            const auto best = static_cast<int32_t>(std::max_element(last, last + width) - last);
            put(out, best);
            run({best}, static_cast<int>(ids.size()) + i);
            last = llama_get_logits_ith(context, 0);
        }
        llama_batch_free(batch);
        llama_free(context);
    }
    llama_model_free(model);
    return out.good() ? 0 : 1;
}
