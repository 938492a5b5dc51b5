// Models as a whole: from the ids of tokens to hidden states, or to completions drawn step by step.
//
// Whoever begins may do something else while helpers compute, and joins them when it needs the results.

#include <memory>
#include <tuple>
#include <utility>

#include "drafts.h"
#include "passes.h"
#include "team.h"

namespace {

// Completions under way: of everything a row for each slot, see `completions.py`.
struct Sheet {
    int64_t* tokens;  // (slots, columns): the last ones of the prompt, those drawn, those guessed
    float* logprobs;  // (slots, columns - CONTEXT)
    int64_t* drawn;   // how many tokens
    const int64_t *prompt_end, *budget, *trunk_of, *begun, *voices;
    const uint64_t* seeds;  // (slots, 2)
    const float* temperatures;
    const uint8_t* ends;  // (end_count,) whether a token ends every completion; those beyond it do not
    Entry* table;         // of guesses, if there are any; learns from completions that are over
    int64_t columns, end_count, bits;
};

// Tokens of prompts, to be computed beside completions.
struct Prompts {
    const int64_t *slots, *first, *counts, *complete, *trunk_of, *begun, *voices;  // a number for each of them
    const int64_t* ids;                                                            // of one after those of the other
    int64_t count;
};

// The first tokens of one slot go to another.
struct Copy {
    int64_t source, target, tokens;
};

// What a decoding did: completions that are over, a slot for each and whether it was stopped; how many, tokens of
// completions that were run, and steps; of any completion, how many tokens are drawn.
struct Outcome {
    int64_t *over, *stopped;
    int64_t count, rows, steps, most_drawn;
};

// Number `index` of the random numbers of a seed, in [0, 1): those of NumPy's generator `Philox`, which is Philox4x64-10
// (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
double random_number(const uint64_t* seed, int64_t index) {
    uint64_t counter[4] = {static_cast<uint64_t>(index) / 4 + 1, 0, 0, 0}, key[2] = {seed[0], seed[1]};
    for (int round = 0; round < 10; round++) {
        const unsigned __int128 a = static_cast<unsigned __int128>(0xD2E7470EE14C6C93u) * counter[0];
        const unsigned __int128 b = static_cast<unsigned __int128>(0xCA5A826395121157u) * counter[2];
        const uint64_t next[4] = {static_cast<uint64_t>(b >> 64) ^ counter[1] ^ key[0], static_cast<uint64_t>(b),
                                  static_cast<uint64_t>(a >> 64) ^ counter[3] ^ key[1], static_cast<uint64_t>(a)};
        std::copy(next, next + 4, counter);
        key[0] += 0x9E3779B97F4A7C15u;
        key[1] += 0xBB67AE8584CAA73Bu;
    }
    return (counter[index % 4] >> 11) * (1.0 / 9007199254740992.0);
}

// Steps of decoding, `least` of them, and more until a completion is over or so many are done: completions have a token
// each, and what may come after it, guesses that hold if they are what is drawn; beside them, in the first step, are
// tokens of prompts. Before that, keys and values are copied, layer by layer.
template <class T>
class Decoding : public Job {
   public:
    Decoding(std::unique_ptr<Pass<T>> pass, int64_t threads, const Sheet& sheet, const Prompts& prompts,
             const int64_t* active, int64_t count, const Copy* copies, int64_t copy_count, const Trunk* trunks,
             int64_t trunk_count, int64_t guesses, int64_t least, int64_t steps, Outcome* outcome)
        : Job(threads - 1), pass(std::move(pass)), sheet(sheet), trunks(trunks), trunk_count(trunk_count),
          guesses(guesses), least(least), steps(steps), outcome(outcome), prompts(prompts),
          active(active, active + count), copies(copies, copies + copy_count) {}

   protected:
    bool advance() override {
        if (!copies.empty() && !std::exchange(copying, true)) {
            pieces = pass->model.count;
            return true;
        }
        if (!std::exchange(begun, true)) {
            add_prompts();
        } else {
            if ((pieces = pass->next()) > 0) return true;
            accept();
            if (outcome->steps == steps || (outcome->steps >= least && outcome->count > 0)) return false;
            items.clear();
        }
        for (const int64_t slot : active) add(slot);
        active.clear();
        if (items.empty()) return false;
        lay_out();
        pieces = pass->next();
        return true;
    }

    void piece(int64_t which) override {
        if (begun) return pass->piece(which);
        const Cache<T> cache = pass->cache_of(pass->model.layers[which]);
        for (const Copy& copy : copies) cache.copy(copy.source, copy.target, copy.tokens);
    }

   private:
    struct Item {
        int64_t slot, voice, trunk, begun, first, count, wanted;
        const int64_t* ids;
    };

    void add_prompts() {
        int64_t at = 0;
        for (int64_t i = 0; i < prompts.count; i++) {
            items.push_back({prompts.slots[i], prompts.voices[i], prompts.trunk_of[i], prompts.begun[i],
                             prompts.first[i], prompts.counts[i], prompts.complete[i], prompts.ids + at});
            at += prompts.counts[i];
        }
    }

    // A completion's last token, and guesses of what comes after it.
    void add(int64_t slot) {
        const int64_t drawn = sheet.drawn[slot], start = slot * sheet.columns + drawn;
        const int64_t room = std::min(guesses, sheet.budget[slot] - drawn - 1);
        int64_t count = 0;
        if (sheet.table != nullptr && room > 0) guess(sheet.table, sheet.tokens, &start, &room, &count, 1, sheet.bits);
        items.push_back({slot, sheet.voices[slot], sheet.trunk_of[slot], sheet.begun[slot],
                         sheet.prompt_end[slot] + drawn, count + 1, count + 1, sheet.tokens + start + CONTEXT - 1});
        outcome->rows += count + 1;
    }

    // Whether both draw after the same trunk and the same token, as those do who were asked the same: that is run once.
    static bool are_twins(const Item& one, const Item& other) {
        const auto single = [](const Item& item) { return item.first == 0 && item.count == 1 && item.wanted == 1; };
        return single(one) && single(other) && one.voice == other.voice && one.trunk == other.trunk &&
               one.ids[0] == other.ids[0];
    }

    void lay_out() {
        // Rows of one voice are computed together, and of them those of one trunk.
        std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
            return std::tie(a.voice, a.trunk, a.slot) < std::tie(b.voice, b.trunk, b.slot);
        });
        for (auto* rows : {&ids, &positions, &slots, &own, &lengths, &trunk_of, &voices, &wanted}) rows->clear();
        temperatures.clear();
        uniforms.clear();
        twins.clear();
        twins_first.clear();
        const Item* before = nullptr;
        for (const Item& item : items) {
            const bool twin = before != nullptr && are_twins(*before, item);
            before = &item;
            if (twin) {
                twins.push_back(item.slot);
                outcome->rows--;
            }
            for (int64_t i = 0; i < item.count; i++) {
                const int64_t place = item.first + i, drawing = i - (item.count - item.wanted);
                if (drawing >= 0) {
                    wanted.push_back(twin ? ids.size() - 1 : ids.size());
                    temperatures.push_back(sheet.temperatures[item.slot]);
                    // A token has its random number, whether it is drawn now or was guessed wrongly and is drawn later.
                    const int64_t number = sheet.drawn[item.slot] + drawing;
                    uniforms.push_back(random_number(sheet.seeds + 2 * item.slot, number));
                }
                if (twin) continue;
                twins_first.push_back(twins.size());
                ids.push_back(item.ids[i]);
                positions.push_back(item.begun + place);
                slots.push_back(item.slot);
                own.push_back(place);
                lengths.push_back(place + 1);
                trunk_of.push_back(item.trunk);
                voices.push_back(item.voice);
            }
        }
        twins_first.push_back(twins.size());
        tokens.resize(wanted.size());
        logprobs.resize(wanted.size());
        const int64_t rows = ids.size(), count = wanted.size();
        pass->take({ids.data(), positions.data(), slots.data(), own.data(), lengths.data(), trunk_of.data(),
                    voices.data(), wanted.data(), trunks, rows, trunk_count, count},
                   {temperatures.data(), uniforms.data(), tokens.data(), logprobs.data()}, nullptr,
                   {twins_first.data(), twins.data()});
    }

    // Of each completion the first token that was drawn, and each that comes after one that was guessed.
    void accept() {
        outcome->steps++;
        int64_t at = 0;
        for (const Item& item : items) {
            if (item.wanted == 0) continue;
            const int64_t slot = item.slot;
            int64_t* const said = sheet.tokens + slot * sheet.columns + CONTEXT;
            int64_t& drawn = sheet.drawn[slot];
            bool stopped = false, held = true;
            for (int64_t i = 0; i < item.wanted && held; i++, drawn++) {
                const int64_t token = tokens[at + i];
                stopped = token < sheet.end_count && sheet.ends[token];
                held = !stopped && said[drawn] == token;
                said[drawn] = token;
                sheet.logprobs[slot * (sheet.columns - CONTEXT) + drawn] = logprobs[at + i];
            }
            at += item.wanted;
            outcome->most_drawn = std::max(outcome->most_drawn, drawn);
            if (!stopped && drawn < sheet.budget[slot]) {
                active.push_back(slot);
                continue;
            }
            if (sheet.table != nullptr) learn(sheet.table, said - CONTEXT, CONTEXT + drawn, sheet.bits);
            outcome->over[outcome->count] = slot;
            outcome->stopped[outcome->count++] = stopped;
        }
    }

    const std::unique_ptr<Pass<T>> pass;
    const Sheet sheet;
    const Trunk* const trunks;
    const int64_t trunk_count, guesses, least, steps;
    Outcome* const outcome;
    const Prompts prompts;
    bool copying = false, begun = false;
    std::vector<int64_t> active;  // slots of completions that are run next
    const std::vector<Copy> copies;
    std::vector<Item> items;
    std::vector<int64_t> ids, positions, slots, own, lengths, trunk_of, voices, wanted, tokens, twins, twins_first;
    std::vector<float> temperatures, logprobs;
    std::vector<double> uniforms;
};

// One pass.
template <class T>
class Once : public Job {
   public:
    Once(std::unique_ptr<Pass<T>> pass, int64_t threads) : Job(threads - 1), pass(std::move(pass)) {}

   protected:
    bool advance() override { return (pieces = pass->next()) > 0; }

    void piece(int64_t which) override { pass->piece(which); }

   private:
    const std::unique_ptr<Pass<T>> pass;
};

}  // namespace

// A pass over a small model, or steps of decoding with it, which helpers begin with; what is begun has to be finished. All
// that it reads or writes stays in place until then.
#define WHOLE(T, NAME)                                                                                               \
    extern "C" Job* begin_pass_##NAME(const Model<T>* model, const Batch* batch, T* hidden, int64_t most,            \
                                      int64_t threads, float scaling, float eps) {                                   \
        auto pass = pass_through(*model, scaling, eps, most, threads);                                               \
        pass->take(*batch, {}, hidden);                                                                              \
        auto* const job = new Once<T>(std::move(pass), threads);                                                     \
        team().begin(job);                                                                                           \
        return job;                                                                                                  \
    }                                                                                                                \
    extern "C" Job* begin_decoding_##NAME(const Model<T>* model, const Sheet* sheet, const Prompts* prompts,         \
                                          const int64_t* active, const Copy* copies, const Trunk* trunks,            \
                                          Outcome* outcome, int64_t count, int64_t copy_count, int64_t trunk_count,  \
                                          int64_t guesses, int64_t least, int64_t steps, int64_t most,               \
                                          int64_t threads, float scaling, float eps) {                               \
        auto* const job =                                                                                            \
            new Decoding<T>(pass_through(*model, scaling, eps, most, threads), threads, *sheet, *prompts, active,    \
                            count, copies, copy_count, trunks, trunk_count, guesses, least, steps, outcome);         \
        team().begin(job);                                                                                           \
        return job;                                                                                                  \
    }
WHOLE(float, float)
WHOLE(Bf16, bf16)

// Computes what helpers have not begun with, and waits for the rest.
extern "C" void finish(Job* job) {
    team().finish(job);
    delete job;
}
