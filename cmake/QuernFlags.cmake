# Compiler flags of every target. Numerics depend on them: see docs/formats.md.
add_compile_options(-Wall -Wextra -fno-fast-math -ffp-contract=off -fno-omit-frame-pointer)
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  add_compile_options(-Wthread-safety)
endif()
if(QUERN_WERROR)
  add_compile_options(-Werror)
endif()
if(QUERN_SANITIZE)
  # Reports need the lines of a stack and no more of what -g adds, which takes a sixth of the compiler's time.
  add_compile_options(-fsanitize=${QUERN_SANITIZE} -fno-sanitize-recover=all -gline-tables-only)
  add_link_options(-fsanitize=${QUERN_SANITIZE})
endif()
if(QUERN_FUZZERS)
  # Coverage of the rooms themselves guides the fuzzers; each fuzzer adds the driver.
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()
