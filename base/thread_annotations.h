// Clang's thread-safety attributes; nothing under other compilers.
#ifndef QUERN_BASE_THREAD_ANNOTATIONS_H_
#define QUERN_BASE_THREAD_ANNOTATIONS_H_

#if defined(__clang__)
#define QUERN_ATTRIBUTE_(x) __attribute__((x))
#else
#define QUERN_ATTRIBUTE_(x)
#endif

#define QUERN_CAPABILITY(x) QUERN_ATTRIBUTE_(capability(x))
#define QUERN_SCOPED_CAPABILITY QUERN_ATTRIBUTE_(scoped_lockable)
#define QUERN_GUARDED_BY(x) QUERN_ATTRIBUTE_(guarded_by(x))
#define QUERN_PT_GUARDED_BY(x) QUERN_ATTRIBUTE_(pt_guarded_by(x))
#define QUERN_REQUIRES(...) QUERN_ATTRIBUTE_(requires_capability(__VA_ARGS__))
#define QUERN_EXCLUDES(...) QUERN_ATTRIBUTE_(locks_excluded(__VA_ARGS__))
#define QUERN_ACQUIRE(...) QUERN_ATTRIBUTE_(acquire_capability(__VA_ARGS__))
#define QUERN_RELEASE(...) QUERN_ATTRIBUTE_(release_capability(__VA_ARGS__))
#define QUERN_NO_THREAD_SAFETY_ANALYSIS QUERN_ATTRIBUTE_(no_thread_safety_analysis)

#endif  // QUERN_BASE_THREAD_ANNOTATIONS_H_
