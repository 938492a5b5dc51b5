// Small models as a whole: from the ids of tokens to hidden states, and to the tokens drawn by them.
//
// Between products of small matrices, making calls and waiting for other threads takes longer than computing. So rows
// are cut into pieces, and one thread takes a piece through all layers. Whoever begins a pass may do something else
// while helpers compute, and joins them when it needs the results.

#include <atomic>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "blocks.h"

namespace {

// Work in pieces that any thread may do, in their order.
struct Job {
    int64_t pieces = 0, helpers = 0;
    std::atomic<int64_t> next{0};
    int64_t busy = 0;  // how many helpers are at it

    virtual ~Job() = default;
    virtual void piece(int64_t which) = 0;

    void run() {
        for (int64_t which; (which = next.fetch_add(1)) < pieces;) piece(which);
    }
};

// Threads that help with jobs, and sleep where there are none. They are not OpenMP's: those would spin between two jobs,
// and take the core that Python runs on.
class Team {
   public:
    void begin(Job* job) {
        {
            std::lock_guard<std::mutex> hold(mutex);
            try {
                for (; size < job->helpers; size++) std::thread(&Team::help, this).detach();
            } catch (const std::system_error&) {  // the machine allows no more; whoever finishes the job does it all
            }
            jobs.push_back(job);
        }
        wake.notify_all();
    }

    void finish(Job* job) {
        job->run();
        std::unique_lock<std::mutex> hold(mutex);
        jobs.remove(job);
        idle.wait(hold, [&] { return job->busy == 0; });
    }

   private:
    void help() {
        std::unique_lock<std::mutex> hold(mutex);
        for (Job* job;;) {
            wake.wait(hold, [&] {
                const auto found = std::find_if(jobs.begin(), jobs.end(), [](Job* one) { return one->busy < one->helpers; });
                job = found == jobs.end() ? nullptr : *found;
                return job != nullptr;
            });
            job->busy++;
            hold.unlock();
            job->run();
            hold.lock();
            jobs.remove(job);  // all of its pieces are taken
            if (--job->busy == 0) idle.notify_all();
        }
    }

    std::mutex mutex;
    std::condition_variable wake, idle;
    std::list<Job*> jobs;
    int64_t size = 0;
};

// It lives as long as the process: its threads may sleep in it to the end.
Team& team() {
    static Team* const all = new Team;
    return *all;
}

template <class T>
struct Layer {
    const T *norm_in, *norm_mid, *q_norm, *k_norm;
    Linear<T> qkv, out, gate_up, down;
    T *keys, *values;
};

template <class T>
struct Model {
    const T* embedding;
    const Layer<T>* layers;
    int64_t count;
    const T* norm;
    Linear<T> head;
    const float *cosines, *sines;  // (positions, d)
    int64_t width, heads, kv_heads, d, capacity;
};

// New tokens, a row for each; those of a slot are neighbours, in their order.
struct Batch {
    const int64_t *ids, *positions, *slots, *own, *lengths, *trunk_of, *wanted;
    const Trunk* trunks;  // as many for each layer
    int64_t rows, trunk_count, wanted_count;
};

// What is drawn for the rows that are wanted, and by what.
struct Drawing {
    const float* temperatures;
    const double* uniforms;
    int64_t* tokens;
    float* logprobs;
};

// All layers for a batch. `hidden` (wanted, width) gets final hidden states, unless it is missing; and where there are
// temperatures, a token is drawn for each of them.
template <class T>
struct Pass : Job {
    const Model<T> model;
    const Batch batch;
    const Drawing drawing;
    T* const hidden;
    const float scaling, eps;
    std::vector<int64_t> cuts;                        // the first row of each piece, and the end
    std::unique_ptr<std::atomic<int64_t>[]> written;  // for each piece, in how many layers its keys and values are there

    Pass(const Model<T>& model, const Batch& batch, const Drawing& drawing, T* hidden, float scaling, float eps,
         int64_t most, int64_t threads)
        : model(model), batch(batch), drawing(drawing), hidden(hidden), scaling(scaling), eps(eps) {
        const int64_t wanted = std::min(batch.rows, threads * ((batch.rows + threads * most - 1) / (threads * most)));
        for (int64_t number = 0, row = 0; row < batch.rows; number++) {
            cuts.push_back(row);
            const int64_t end = std::max(row + 1, batch.rows * (number + 1) / wanted), limit = end + most;
            // Rows of one slot stay together, unless they are many.
            for (row = end; row < std::min(batch.rows, limit) && batch.slots[row] == batch.slots[row - 1];) row++;
            if (row == limit) row = end;
        }
        pieces = cuts.size();
        cuts.push_back(batch.rows);
        helpers = threads - 1;
        written.reset(new std::atomic<int64_t>[pieces]());
    }

    void piece(int64_t which) override {
        thread_local std::vector<float> sums, in, joined, queries, gated, change;
        const int64_t first = cuts[which], n = cuts[which + 1] - first, width = model.width;
        const Cache<T> cache{nullptr, nullptr, model.kv_heads, model.capacity, model.d};
        Attention<T> attention{cache, batch.trunks, batch.trunk_of, batch.slots, batch.lengths,
                               model.heads / model.kv_heads};
        Heads<T> heads{nullptr,     nullptr, model.cosines, model.sines, batch.positions, batch.slots,
                       batch.own, cache,   model.heads,   scaling,     eps};
        const auto blocks = attention.blocks(first, first + n);
        const int64_t q_size = attention.row_size();
        sums.resize(n * width);
        in.resize(n * width);
        change.resize(n * width);
        queries.resize(n * q_size);
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < width; j++)
                sums[i * width + j] = number(model.embedding[batch.ids[first + i] * width + j]);
        for (int64_t index = 0; index < model.count; index++) {
            const Layer<T>& layer = model.layers[index];
            const int64_t inner = layer.down.inputs;
            attention.cache.keys = heads.cache.keys = layer.keys;
            attention.cache.values = heads.cache.values = layer.values;
            attention.trunks = batch.trunks + index * batch.trunk_count;
            heads.q_norm = layer.q_norm;
            heads.k_norm = layer.k_norm;
            joined.resize(n * std::max(layer.qkv.outputs, 2 * inner));
            gated.resize(n * inner);
            for (int64_t i = 0; i < n; i++)
                add_norm<float>(&sums[i * width], nullptr, layer.norm_in, &in[i * width], width, eps);
            layer.qkv(in.data(), joined.data(), n);
            for (int64_t i = 0; i < n; i++)
                heads.split(&joined[i * layer.qkv.outputs], &queries[i * q_size], first + i);
            written[which].store(index + 1, std::memory_order_release);
            // Whoever does earlier pieces never waits for later ones.
            for (int64_t before = which; before > 0 && batch.slots[cuts[before] - 1] == batch.slots[first]; before--)
                while (written[before - 1].load(std::memory_order_acquire) <= index) std::this_thread::yield();
            for (const auto& block : blocks) {
                float* const at = &queries[(block.first - first) * q_size];
                for (int64_t head = 0; head < model.kv_heads; head++) attention.attend(at, at, block, head);
            }
            layer.out(queries.data(), change.data(), n);
            for (int64_t i = 0; i < n; i++)
                add_norm(&sums[i * width], &change[i * width], layer.norm_mid, &in[i * width], width, eps);
            layer.gate_up(in.data(), joined.data(), n);
            for (int64_t i = 0; i < n; i++) gate_joined(&joined[i * 2 * inner], &gated[i * inner], inner);
            layer.down(gated.data(), change.data(), n);
            for (int64_t i = 0; i < n * width; i++) sums[i] += change[i];
        }
        deliver(first, n, sums.data(), in.data());
    }

    // What is wanted of a piece: its rows from `first` on, whose sums (n, width) are complete.
    void deliver(int64_t first, int64_t n, float* sums, float* normed) const {
        constexpr int64_t TOGETHER_DRAWN = 16;  // rows whose logits stay in a processor's cache
        thread_local std::vector<float> logits;
        const int64_t width = model.width, vocabulary = model.head.outputs;
        const int64_t *const all = batch.wanted, *const none = all + batch.wanted_count;
        const int64_t from = std::lower_bound(all, none, first) - all, to = std::lower_bound(all, none, first + n) - all;
        for (int64_t k = from; k < to; k++) {
            float* const row = sums + (all[k] - first) * width;
            add_norm<float>(row, nullptr, model.norm, normed + (k - from) * width, width, eps);
            if (hidden != nullptr)
                for (int64_t j = 0; j < width; j++) put(hidden + k * width + j, normed[(k - from) * width + j]);
        }
        if (drawing.temperatures == nullptr) return;
        logits.resize(TOGETHER_DRAWN * vocabulary);
        for (int64_t k = from; k < to; k += TOGETHER_DRAWN) {
            const int64_t m = std::min(TOGETHER_DRAWN, to - k);
            model.head(normed + (k - from) * width, logits.data(), m);
            for (int64_t i = 0; i < m; i++)
                drawing.tokens[k + i] = draw_token(&logits[i * vocabulary], drawing.temperatures[k + i],
                                                   drawing.uniforms[k + i], vocabulary, drawing.logprobs + k + i);
        }
    }
};

}  // namespace

// A pass over a small model that helpers begin with; it has to be finished. All that it reads or writes stays in place
// until then.
#define WHOLE(T, NAME)                                                                                              \
    extern "C" Job* begin_pass_##NAME(const Model<T>* model, const Batch* batch, const Drawing* drawing, T* hidden,  \
                                      int64_t most, int64_t threads, float scaling, float eps) {                    \
        Job* const job = new Pass<T>(*model, *batch, *drawing, hidden, scaling, eps, most, threads);                 \
        team().begin(job);                                                                                          \
        return job;                                                                                                 \
    }
WHOLE(float, float)
WHOLE(Bf16, bf16)

// Computes what helpers have not begun with, and waits for the rest.
extern "C" void finish_pass(Job* job) {
    team().finish(job);
    delete job;
}
