// New tokens through all layers of a model, from their ids to hidden states, or to tokens that are drawn: in phases, of
// which each has pieces that any thread may do.

#pragma once

#include <atomic>
#include <memory>
#include <thread>
#include <utility>

#include "strips.h"

namespace {

template <class T>
struct Layer {
    const T *norm_in, *norm_mid, *q_norm, *k_norm;
    Linear<T> qkv, out, gate_up, down;
    T *keys, *values;
};

template <class T>
struct Model {
    const T* embedding;
    const Layer<T>* layers;  // those of one voice after those of the other; keys and values are the same
    int64_t count;           // of each voice
    const T* norm;
    Linear<T> head;
    const float *cosines, *sines;  // (positions, d)
    int64_t width, heads, kv_heads, d;
    int64_t by_columns;  // whether threads share weights, which do not stay in a core's cache
    int64_t capacity;
};

// New tokens, a row for each; those of a slot are neighbours, in their order, and so are those of a voice.
struct Batch {
    const int64_t *ids, *positions, *slots, *own, *lengths, *trunk_of, *voices, *wanted;
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

template <class T>
class Pass {
   public:
    Pass(const Model<T>& model, float scaling, float eps) : model(model), scaling(scaling), eps(eps) {}
    virtual ~Pass() = default;

    // Begins with a batch. `hidden` (wanted, width) gets final hidden states, unless it is missing; and where there are
    // temperatures, a token is drawn for each of them.
    void take(const Batch& next, const Drawing& by, T* to, const Twins& alike = {}) {
        batch = next;
        drawing = by;
        twins = alike;
        hidden = to;
        for (auto* rows : {&kept, &kept_slots, &kept_lengths, &kept_trunk_of, &place}) rows->clear();
        for (int64_t k = 0; k < batch.wanted_count; k++) {
            const int64_t row = batch.wanted[k];
            if (kept.empty() || kept.back() != row) {
                kept.push_back(row);
                kept_slots.push_back(batch.slots[row]);
                kept_lengths.push_back(batch.lengths[row]);
                kept_trunk_of.push_back(batch.trunk_of[row]);
            }
            place.push_back(kept.size() - 1);
        }
        begin();
    }

    // How many pieces the next phase has; none when there is nothing more to do.
    virtual int64_t next() = 0;

    virtual void piece(int64_t which) = 0;

    Cache<T> cache_of(const Layer<T>& layer) const {
        return {layer.keys, layer.values, model.kv_heads, model.capacity, model.d};
    }

    const Model<T> model;

   protected:
    virtual void begin() = 0;

    bool is_last(int64_t index) const { return index + 1 == model.count; }

    // In the last layer, that of the rows which are kept.
    Attention<T> attention_of(const Layer<T>& layer, int64_t index) const {
        const Trunk* const trunks = batch.trunks + index * batch.trunk_count;
        const int64_t group = model.heads / model.kv_heads;
        if (is_last(index))
            return {cache_of(layer), trunks, kept_trunk_of.data(), kept_slots.data(), kept_lengths.data(), group};
        return {cache_of(layer), trunks, batch.trunk_of, batch.slots, batch.lengths, group};
    }
    Heads<T> heads_of(const Layer<T>& layer) const {
        return {layer.q_norm, layer.k_norm, model.cosines, model.sines, batch.positions, batch.slots, batch.own,
                cache_of(layer), model.heads, scaling, eps, twins};
    }
    void embed(int64_t row, float* to) const {
        const T* const from = model.embedding + batch.ids[row] * model.width;
        for (int64_t j = 0; j < model.width; j++) to[j] = number(from[j]);
    }
    // Of what is wanted the token number `k`.
    void draw(const float* logits, int64_t k) const {
        drawing.tokens[k] = draw_token(logits, drawing.temperatures[k], drawing.uniforms[k], model.head.outputs,
                                       drawing.logprobs + k);
    }

    const float scaling, eps;
    Batch batch;
    Drawing drawing;
    Twins twins;
    T* hidden;
    // Rows that are wanted, each once. Of others, nothing is needed beyond the last layer's keys and values.
    std::vector<int64_t> kept, kept_slots, kept_lengths, kept_trunk_of;
    std::vector<int64_t> place;  // of what is wanted, among those that are kept
};

// Moves rows to the front: those numbered from `numbers` on, less `first`, ascending.
inline void move_rows(float* rows, const int64_t* numbers, int64_t count, int64_t first, int64_t width) {
    for (int64_t i = 0; i < count; i++)
        if (numbers[i] - first != i) std::copy_n(rows + (numbers[i] - first) * width, width, rows + i * width);
}

// Each thread with rows of its own, which it takes through all layers: between products of small matrices, making calls
// and waiting for other threads takes longer than computing.
template <class T>
class ByRows : public Pass<T> {
   public:
    // About so many rows, at most, are a piece.
    ByRows(const Model<T>& model, float scaling, float eps, int64_t most, int64_t threads)
        : Pass<T>(model, scaling, eps), threads(threads), most(most) {}

    int64_t next() override { return std::exchange(left, 0); }

    void piece(int64_t which) override {
        thread_local std::vector<float> sums, in, joined, queries, change;
        const Matrices matrices(std::is_same_v<T, Bf16> && way == IN_MATRICES);
        const Model<T>& model = this->model;
        const Batch& batch = this->batch;
        const float eps = this->eps;
        const int64_t first = cuts[which], end = cuts[which + 1], width = model.width;
        const Layer<T>* const layers = model.layers + batch.voices[first] * model.count;
        int64_t from = first, n = end - first;  // rows that are there for attention, and what follows it
        std::vector<std::pair<int64_t, int64_t>> blocks;
        const int64_t q_size = model.heads * model.d;
        sums.resize(n * width);
        in.resize(n * width);
        change.resize(n * width);
        queries.resize(n * q_size);
        for (int64_t i = 0; i < n; i++) this->embed(first + i, &sums[i * width]);
        for (int64_t index = 0; index < model.count; index++) {
            const Layer<T>& layer = layers[index];
            const Attention<T> attention = this->attention_of(layer, index);
            const Heads<T> heads = this->heads_of(layer);
            joined.resize(n * layer.qkv.outputs);
            for (int64_t i = 0; i < n; i++)
                add_norm<float>(&sums[i * width], nullptr, layer.norm_in, &in[i * width], width, eps);
            layer.qkv(in.data(), joined.data(), n);
            for (int64_t i = 0; i < n; i++)
                heads.split(&joined[i * layer.qkv.outputs], &queries[i * q_size], first + i);
            written[which].store(index + 1, std::memory_order_release);
            // Whoever does earlier pieces never waits for later ones.
            for (int64_t before = which; before > 0 && batch.slots[cuts[before] - 1] == batch.slots[first]; before--)
                while (written[before - 1].load(std::memory_order_acquire) <= index) std::this_thread::yield();
            if (this->is_last(index)) {
                const auto& kept = this->kept;
                from = std::lower_bound(kept.begin(), kept.end(), first) - kept.begin();
                n = std::lower_bound(kept.begin(), kept.end(), end) - kept.begin() - from;
                if (n == 0) return;
                move_rows(sums.data(), kept.data() + from, n, first, width);
                move_rows(queries.data(), kept.data() + from, n, first, q_size);
            }
            if (blocks.empty() || this->is_last(index)) blocks = attention.blocks(from, from + n);
            for (const auto& block : blocks) {
                float* const at = &queries[(block.first - from) * q_size];
                for (int64_t head = 0; head < model.kv_heads; head++) attention.attend(at, at, block, head);
            }
            layer.out(queries.data(), change.data(), n);
            for (int64_t i = 0; i < n; i++)
                add_norm(&sums[i * width], &change[i * width], layer.norm_mid, &in[i * width], width, eps);
            change_by(layer, in.data(), change.data(), n);
            for (int64_t i = 0; i < n * width; i++) sums[i] += change[i];
        }
        deliver(from, n, sums.data(), in);
    }

   protected:
    void begin() override {
        const Batch& batch = this->batch;
        cuts.clear();
        const int64_t rounds = ceil_div(batch.rows, threads * most);
        for (int64_t start = 0, stop = 0; start < batch.rows; start = stop) {
            while (stop < batch.rows && batch.voices[stop] == batch.voices[start]) stop++;
            const int64_t rows = stop - start, wanted = ceil_div(rows * threads * rounds, batch.rows);
            for (int64_t number = 0, row = start; row < stop; number++) {
                cuts.push_back(row);
                const int64_t end = std::max(row + 1, start + rows * (number + 1) / wanted), limit = end + most;
                // Rows of one slot stay together, unless they are many.
                for (row = end; row < std::min(stop, limit) && batch.slots[row] == batch.slots[row - 1];) row++;
                if (row == limit) row = end;
            }
        }
        left = cuts.size();
        written.reset(new std::atomic<int64_t>[left]());
        cuts.push_back(batch.rows);
    }

    // What the layer's gates let through makes of normed rows.
    virtual void change_by(const Layer<T>& layer, const float* in, float* change, int64_t n) {
        thread_local std::vector<float> joined, gated;
        const int64_t inner = layer.down.inputs;
        joined.resize(n * 2 * inner);
        gated.resize(n * inner);
        layer.gate_up(in, joined.data(), n);
        for (int64_t i = 0; i < n; i++) gate_joined(&joined[i * 2 * inner], &gated[i * inner], inner);
        layer.down(gated.data(), change, n);
    }

    const int64_t threads;

   private:
    // What is wanted of a piece: of kept rows, from `first` on, whose sums (n, width) are complete.
    void deliver(int64_t first, int64_t n, float* sums, std::vector<float>& normed) const {
        constexpr int64_t TOGETHER_DRAWN = 32;  // rows whose logits stay in a processor's cache
        thread_local std::vector<float> logits;
        const Model<T>& model = this->model;
        const auto& place = this->place;
        const int64_t width = model.width, vocabulary = model.head.outputs;
        const int64_t from = std::lower_bound(place.begin(), place.end(), first) - place.begin();
        const int64_t to = std::lower_bound(place.begin(), place.end(), first + n) - place.begin();
        normed.resize(std::max(n, to - from) * width);  // a row may be wanted more than once
        for (int64_t k = from; k < to; k++) {
            float* const to_row = &normed[(k - from) * width];
            add_norm<float>(sums + (place[k] - first) * width, nullptr, model.norm, to_row, width, this->eps);
            if (this->hidden != nullptr)
                for (int64_t j = 0; j < width; j++) put(this->hidden + k * width + j, to_row[j]);
        }
        if (this->drawing.temperatures == nullptr) return;
        logits.resize(TOGETHER_DRAWN * vocabulary);
        for (int64_t k = from; k < to; k += TOGETHER_DRAWN) {
            const int64_t m = std::min(TOGETHER_DRAWN, to - k);
            model.head(&normed[(k - from) * width], logits.data(), m);
            for (int64_t i = 0; i < m; i++) this->draw(&logits[i * vocabulary], k + i);
        }
    }

    const int64_t most;
    int64_t left = 0;
    std::vector<int64_t> cuts;                        // the first row of each piece, and the end
    std::unique_ptr<std::atomic<int64_t>[]> written;  // for each piece, in how many layers its keys and values are there
};

// The same, to the last bit if products are computed in pairs or matrices, for weights that do not stay in a core's cache:
// all threads take rows through each product together, so that a weight is read once; by matrices, only while there are
// few. What products read is rounded when it is written. Numbers of inputs are even, and those of gates a multiple of
// TILE.
class ByColumns : public ByRows<Bf16> {
   public:
    using ByRows::ByRows;

    int64_t next() override {
        if (!together) return ByRows::next();
        const int64_t layers = model.count * PHASES;
        phase = at < layers ? at % PHASES : at - layers + PHASES;
        index = at++ / PHASES;
        switch (phase) {
            case NORM:
            case SPLIT:
            case NORM_AGAIN:
                return pieces_of(going_on);
            case PROJECT:
                return tiles_of(layer().qkv) * parts_of(going_on);
            case ATTEND:
                if (is_last(index)) {
                    going_on = kept.size();
                    move_rows(sums.data(), kept.data(), going_on, 0, model.width);
                    move_rows(queries.data(), kept.data(), going_on, 0, model.heads * model.d);
                }
                if (index == 0 || is_last(index)) blocks = attention_of(layer(), index).blocks(0, going_on);
                return blocks.size() * model.kv_heads;
            case OUT:
                return tiles_of(layer().out) * parts_of(going_on);
            case GATE:
                return tiles_of(layer().gate_up) / 2 * parts_of(going_on);
            case DOWN:
                return tiles_of(layer().down) * parts_of(going_on);
            case FINISH:
                return pieces_of(batch.wanted_count);
            case HEAD:
                return drawing.temperatures == nullptr ? 0 : tiles_of(model.head) * parts_of(batch.wanted_count);
            case DRAW:
                return drawing.temperatures == nullptr ? 0 : pieces_of(batch.wanted_count);
            default:
                return 0;
        }
    }

    void piece(int64_t which) override {
        if (!together) return ByRows::piece(which);
        const Matrices matrices(way == IN_MATRICES);
        const int64_t width = model.width, q_size = model.heads * model.d;
        switch (phase) {
            case NORM:
            case NORM_AGAIN: {
                const Bf16* const weight = phase == NORM ? layer().norm_in : layer().norm_mid;
                each_row(which, going_on, [&](int64_t row) {
                    if (phase == NORM && index == 0) embed(row, &sums[row * width]);
                    add_norm<float>(&sums[row * width], nullptr, weight, &in[row * width], width, eps);
                });
                break;
            }
            case PROJECT:
                write(layer().qkv, in.data(), which, joined, going_on);
                break;
            case SPLIT: {
                const Heads<Bf16> heads = heads_of(layer());
                each_row(which, going_on, [&](int64_t row) {
                    heads.split(&joined[row * layer().qkv.outputs], &queries[row * q_size], row);
                });
                break;
            }
            case ATTEND: {
                const auto& block = blocks[which / model.kv_heads];
                const int64_t from = block.first * q_size;
                attention_of(layer(), index).attend(&queries[from], &attended[from], block, which % model.kv_heads);
                break;
            }
            case OUT:
                add(layer().out, attended.data(), which);
                break;
            case GATE:
                gate(which);
                break;
            case DOWN:
                add(layer().down, gated.data(), which);
                break;
            case FINISH:
                each_row(which, batch.wanted_count, [&](int64_t k) {
                    add_norm<float>(&sums[place[k] * width], nullptr, model.norm, &in[k * width], width, eps);
                    if (hidden != nullptr) std::copy_n(&in[k * width], width, hidden + k * width);
                });
                break;
            case HEAD:
                write(model.head, in.data(), which, logits, batch.wanted_count);
                break;
            case DRAW:
                each_row(which, batch.wanted_count, [&](int64_t k) { draw(&logits[k * model.head.outputs], k); });
                break;
        }
    }

   protected:
    // Where registers hold matrices, rows of such a model are too long for them to lie one after the other.
    void change_by(const Layer<Bf16>& layer, const float* in, float* change, int64_t n) override {
        const int64_t width = layer.gate_up.inputs;
        if (!lie_in_strips(width, layer.down.inputs) || layer.gate_up.bias || layer.down.bias)
            return ByRows::change_by(layer, in, change, n);
        for (int64_t first = 0; first < n; first += PIECE_IN_MATRICES)
            change_in_strips(in + first * width, layer.gate_up, layer.down, nullptr, change + first * width,
                             std::min(PIECE_IN_MATRICES, n - first));
    }

   private:
    enum : int64_t { NORM, PROJECT, SPLIT, ATTEND, OUT, NORM_AGAIN, GATE, DOWN, PHASES, FINISH = PHASES, HEAD, DRAW };
    static constexpr int64_t SOME = 8;    // rows that are a piece where nothing is multiplied
    static constexpr int64_t MANY = 512;  // rows that are multiplied by all tiles before others are, so they stay at hand
    static constexpr int64_t FEWER = 32;  // rows for each thread: by matrices, exchanging results of so many takes longer

    static int64_t pieces_of(int64_t rows) { return ceil_div(rows, SOME); }
    static int64_t parts_of(int64_t rows) { return ceil_div(rows, MANY); }
    static int64_t tiles_of(const Linear<Bf16>& linear) { return ceil_div(linear.outputs, TILE); }

    const Layer<Bf16>& layer() const { return model.layers[index]; }

    void begin() override {
        together = way != IN_MATRICES || batch.rows < FEWER * threads;
        if (!together) return ByRows::begin();
        at = 0;
        const int64_t rows = going_on = batch.rows, q_size = model.heads * model.d;
        const Layer<Bf16>& one = model.layers[0];
        sums.resize(rows * model.width);
        queries.resize(rows * q_size);
        joined.resize(rows * one.qkv.outputs);
        const int64_t filled = round_up(std::max(rows, batch.wanted_count), SIDE);  // see `multiply_matrices`
        in.resize(filled * model.width);
        attended.resize(filled * q_size);
        gated.resize(filled * one.down.inputs);
        if (drawing.temperatures != nullptr) logits.resize(batch.wanted_count * model.head.outputs);
    }

    template <class Work>
    void each_row(int64_t which, int64_t rows, Work work) const {
        for (int64_t row = which * SOME; row < std::min(rows, (which + 1) * SOME); row++) work(row);
    }

    // What is a piece where rows are multiplied: a tile of the weight, and some of the rows.
    struct Part {
        int64_t tile, first, rows;
    };

    static Part part_of(int64_t which, int64_t tiles, int64_t rows) {
        const int64_t first = which / tiles * MANY;
        return {which % tiles, first, std::min(MANY, rows - first)};
    }

    // The products of rows of x with a tile of a weight; in pairs they may be added to what is there. Returns how many
    // numbers of each row these are.
    int64_t multiply(const Linear<Bf16>& linear, const Bf16* x, Part part, float* out, int64_t stride,
                     bool add = false) const {
        const int64_t inputs = linear.inputs, first = part.tile * TILE, width = std::min(TILE, linear.outputs - first);
        const Bf16 *const weight = linear.tiles + first * inputs, *const from = x + part.first * inputs;
        if (way == ONE_BY_ONE) {
            std::vector<float> wide(part.rows * inputs);
            for (size_t i = 0; i < wide.size(); i++) wide[i] = number(from[i]);
            multiply_tiles(wide.data(), weight, out, part.rows, width, inputs, stride);
        } else {
            // This thread's next tile, as long as all of them are equally fast.
            const Bf16* const soon = weight + threads * TILE * inputs;
            multiply_pairs(reinterpret_cast<const uint32_t*>(from), reinterpret_cast<const uint32_t*>(weight), TILE,
                           inputs / 2, out, stride, part.rows, width, add, reinterpret_cast<const uint32_t*>(soon));
        }
        for (int64_t i = 0; i < part.rows && linear.bias != nullptr; i++)
            for (int64_t j = 0; j < width; j++) out[i * stride + j] += number(linear.bias[first + j]);
        return width;
    }

    void add(const Linear<Bf16>& linear, const Bf16* x, int64_t which) {
        const Part part = part_of(which, tiles_of(linear), going_on);
        float* const to = &sums[part.first * linear.outputs + part.tile * TILE];
        if (way == IN_PAIRS && linear.bias == nullptr) {  // what is added is complete, as it is below
            multiply(linear, x, part, to, linear.outputs, true);
            return;
        }
        float change[MANY * TILE];
        const int64_t width = multiply(linear, x, part, change, TILE);
        for (int64_t i = 0; i < part.rows; i++)
            for (int64_t j = 0; j < width; j++) to[i * linear.outputs + j] += change[i * TILE + j];
    }

    void write(const Linear<Bf16>& linear, const Bf16* x, int64_t which, std::vector<float>& out, int64_t rows) const {
        const Part part = part_of(which, tiles_of(linear), rows);
        multiply(linear, x, part, &out[part.first * linear.outputs + part.tile * TILE], linear.outputs);
    }

    // A tile of gates, and what passes them.
    void gate(int64_t which) {
        const Linear<Bf16>& linear = layer().gate_up;
        const int64_t inner = linear.outputs / 2, tiles = inner / TILE;
        const Part part = part_of(which, tiles, going_on);
        float gates[MANY * TILE], ups[MANY * TILE];
        multiply(linear, in.data(), part, gates, TILE);
        multiply(linear, in.data(), {part.tile + tiles, part.first, part.rows}, ups, TILE);
        for (int64_t i = 0; i < part.rows; i++) {
            Bf16* const to = &gated[(part.first + i) * inner + part.tile * TILE];
#pragma omp simd
            for (int64_t j = 0; j < TILE; j++) put(to + j, silu(gates[i * TILE + j]) * ups[i * TILE + j]);
        }
    }

    bool together = false;
    int64_t at = 0, phase = 0, index = 0;
    int64_t going_on = 0;  // rows: in the last layer, after keys and values, those that are kept
    std::vector<std::pair<int64_t, int64_t>> blocks;
    std::vector<float> sums, joined, queries, logits;
    std::vector<Bf16> in, attended, gated;
};

// Whichever suits the model.
template <class T>
std::unique_ptr<Pass<T>> pass_through(const Model<T>& model, float scaling, float eps, int64_t most, int64_t threads) {
    if constexpr (std::is_same_v<T, Bf16>)
        if (model.by_columns) return std::make_unique<ByColumns>(model, scaling, eps, most, threads);
    return std::make_unique<ByRows<T>>(model, scaling, eps, most, threads);
}

}  // namespace
