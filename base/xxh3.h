// XXH3 with the widest vectors of this processor: the library's own functions keep to those that every processor has.
#ifndef QUERN_BASE_XXH3_H_
#define QUERN_BASE_XXH3_H_

#include <xxhash.h>
#if defined(__x86_64__)
#include <xxh_x86dispatch.h>
#endif

#endif  // QUERN_BASE_XXH3_H_
