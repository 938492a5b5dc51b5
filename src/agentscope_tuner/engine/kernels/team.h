// Threads that help with what one of them began.

#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

// Work in steps, and each step in pieces that any thread may do, in their order.
class Job {
   public:
    explicit Job(int64_t helpers) : helpers(helpers) {}
    virtual ~Job() = default;

    // Works on it until there is nothing left to do.
    void run() {
        std::unique_lock<std::mutex> hold(mutex);
        while (!over) {
            if (next < pieces) {
                const int64_t which = next++;
                hold.unlock();
                piece(which);
                hold.lock();
                done++;
            } else if (done == pieces) {
                over = !advance();
                next = done = 0;
            } else {  // others compute the last pieces of a step, which does not take long
                hold.unlock();
                std::this_thread::yield();
                hold.lock();
            }
        }
    }

    const int64_t helpers;
    int64_t busy = 0;  // how many helpers are at it

   protected:
    virtual void piece(int64_t which) = 0;

    // When all pieces are done, and at first if there are none: whether there is another step, with so many `pieces`.
    virtual bool advance() = 0;

    int64_t pieces = 0;

   private:
    std::mutex mutex;
    int64_t next = 0, done = 0;
    bool over = false;
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
        while (job->busy > 0) {  // helpers are about to find that there is nothing left
            hold.unlock();
            std::this_thread::yield();
            hold.lock();
        }
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
            jobs.remove(job);
            job->busy--;
        }
    }

    std::mutex mutex;
    std::condition_variable wake;
    std::list<Job*> jobs;
    int64_t size = 0;
};

// It lives as long as the process: its threads may sleep in it to the end.
Team& team() {
    static Team* const all = new Team;
    return *all;
}

}  // namespace
