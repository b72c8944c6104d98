// Ends a fuzz target at a broken promise, so that libFuzzer keeps the input.
#ifndef QUERN_TESTS_FUZZ_FUZZ_CHECK_H_
#define QUERN_TESTS_FUZZ_FUZZ_CHECK_H_

#include <cstdio>
#include <cstdlib>

#define FUZZ_CHECK(condition)                                                       \
  do {                                                                              \
    if (!(condition)) {                                                             \
      fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      abort();                                                                      \
    }                                                                               \
  } while (false)

#endif  // QUERN_TESTS_FUZZ_FUZZ_CHECK_H_
