// Ctrl-C: the first one asks to stop, the second ends the program at once.
#ifndef QUERN_CLIENT_INTERRUPT_H_
#define QUERN_CLIENT_INTERRUPT_H_

namespace quern::client {

// Takes SIGINT, SIGTERM and SIGHUP while it lives; at most one object at a time. Thread-safe. The second signal says so on stderr and ends
// the process with _exit(1): children notice by their parent's pipe, and what they left is found by the next run.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  bool requested() const;
};

}  // namespace quern::client

#endif  // QUERN_CLIENT_INTERRUPT_H_
