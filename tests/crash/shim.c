/* Counts every call that changes a file below one folder, and lets the n-th of them end the process or fail.
 *
 * Preloaded into a process that has imported everything; each child that it forks arms the shim for itself through
 * crash_arm. Not armed, all calls go straight through.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, EXIT, HALF, FAIL_ONCE, FAIL_FROM, VANISH };
enum { GROWS = 1, SYNCS = 2, OTHER = 4 }; /* what a call needs: space, a working device, neither */
enum { GO, CUT_HERE, CUT_HALF, FAIL };

static char root[PATH_MAX];
static size_t root_length;
static int mode, error_number, log_fd = -1, killed = 137;
static long at;
static atomic_long count;
static atomic_int armed, tripped;

void crash_arm(const char *folder, long n, int how, int error, int log)
{
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
    at = n, mode = how, error_number = error, log_fd = log;
    atomic_store(&count, 0);
    atomic_store(&tripped, 0);
    atomic_store(&armed, 1);
}

long crash_disarm(void)
{
    atomic_store(&armed, 0);
    return atomic_load(&count);
}

static int below(const char *path)
{
    return strncmp(path, root, root_length) == 0 && (path[root_length] == '/' || path[root_length] == 0);
}

/* The absolute path of a name relative to an open folder; links in it are not followed. */
static const char *absolute(int folder, const char *name, char *buffer)
{
    char base[PATH_MAX], link[64];
    if (!name)
        return "";
    if (name[0] == '/')
        return name;
    snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
    ssize_t length = readlink(link, base, sizeof base - 1);
    if (length < 0)
        return name;
    base[length] = 0;
    snprintf(buffer, PATH_MAX, "%s/%s", base, name);
    return buffer;
}

static const char *of_fd(int fd, char *buffer)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, buffer, PATH_MAX - 1);
    buffer[length < 0 ? 0 : length] = 0;
    return buffer;
}

static void leave(void)
{
    syscall(SYS_exit_group, killed);
}

/* One line a call: its number, name, inode and size of the file, path. */
static void note(long number, const char *name, int fd, const char *path)
{
    char line[PATH_MAX + 128];
    struct stat info = {0};
    if (log_fd < 0)
        return;
    if (fd < 0 || fstat(fd, &info))
        lstat(path, &info);
    int length = snprintf(line, sizeof line, "%ld\t%s\t%lu\t%ld\t%s\n", number, name, (unsigned long)info.st_ino,
                          (long)info.st_size, path);
    syscall(SYS_write, log_fd, line, (size_t)length);
}

/* What is to become of a call. */
static int verdict(const char *name, int needs, int fd, const char *path)
{
    if (!atomic_load(&armed) || !below(path))
        return GO;
    long number = atomic_fetch_add(&count, 1) + 1;
    int saved = errno;
    note(number, name, fd, path);
    errno = saved;
    if (number == at) {
        if (mode == EXIT)
            return CUT_HERE;
        if (mode == HALF)
            return CUT_HALF;
        if (mode == FAIL_ONCE || mode == FAIL_FROM) {
            atomic_store(&tripped, mode == FAIL_FROM);
            return FAIL;
        }
        if (mode == VANISH) { /* as a drive that is taken away: what is open stays open, no path leads there */
            char away[PATH_MAX + 8];
            snprintf(away, sizeof away, "%s.away", root);
            syscall(SYS_rename, root, away);
        }
    }
    if (atomic_load(&tripped) && (error_number != ENOSPC || needs == GROWS))
        return FAIL;
    return GO;
}

/* Opening for reading is no point to cut at, but a device that has failed cannot be read either. */
static int unreadable(const char *path)
{
    return atomic_load(&armed) && atomic_load(&tripped) && (error_number == EIO || error_number == ESTALE) && below(path);
}

#define REAL(type, name, ...)                       \
    static type (*real)(__VA_ARGS__);               \
    if (!real)                                      \
        *(void **)&real = dlsym(RTLD_NEXT, #name);

#define JUDGE(name, needs, fd, path)                   \
    switch (verdict(name, needs, fd, path)) {          \
    case CUT_HERE:                                     \
    case CUT_HALF:                                     \
        leave();                                       \
        break;                                         \
    case FAIL:                                         \
        errno = error_number;                          \
        return -1;                                     \
    }

/* As JUDGE, but in the middle of a write half of it is written first; a full disk takes half of it too. */
#define JUDGE_WRITE(name, fd, some)                    \
    if (atomic_load(&armed)) {                         \
        char place[PATH_MAX];                          \
        switch (verdict(name, GROWS, fd, of_fd(fd, place))) { \
        case CUT_HALF:                                 \
            some;                                      \
            leave();                                   \
            break;                                     \
        case CUT_HERE:                                 \
            leave();                                   \
            break;                                     \
        case FAIL:                                     \
            errno = error_number;                      \
            return -1;                                 \
        }                                              \
    }

ssize_t write(int fd, const void *bytes, size_t size)
{
    REAL(ssize_t, write, int, const void *, size_t)
    JUDGE_WRITE("write", fd, real(fd, bytes, size / 2))
    return real(fd, bytes, size);
}

ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t offset)
{
    REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t)
    JUDGE_WRITE("pwrite", fd, real(fd, bytes, size / 2, offset))
    return real(fd, bytes, size, offset);
}

ssize_t pwrite(int fd, const void *bytes, size_t size, off_t offset)
{
    return pwrite64(fd, bytes, size, offset);
}

ssize_t writev(int fd, const struct iovec *parts, int number)
{
    REAL(ssize_t, writev, int, const struct iovec *, int)
    JUDGE_WRITE("writev", fd, real(fd, parts, number / 2))
    return real(fd, parts, number);
}

int fsync(int fd)
{
    char place[PATH_MAX];
    REAL(int, fsync, int)
    JUDGE("fsync", SYNCS, fd, of_fd(fd, place))
    return real(fd);
}

int fdatasync(int fd)
{
    char place[PATH_MAX];
    REAL(int, fdatasync, int)
    JUDGE("fsync", SYNCS, fd, of_fd(fd, place))
    return real(fd);
}

int ftruncate64(int fd, off64_t size)
{
    char place[PATH_MAX];
    REAL(int, ftruncate64, int, off64_t)
    JUDGE("truncate", OTHER, fd, of_fd(fd, place))
    return real(fd, size);
}

int ftruncate(int fd, off_t size)
{
    return ftruncate64(fd, size);
}

int renameat(int from, const char *source, int to, const char *target)
{
    char place[PATH_MAX];
    REAL(int, renameat, int, const char *, int, const char *)
    JUDGE("rename", OTHER, -1, absolute(to, target, place))
    return real(from, source, to, target);
}

int rename(const char *source, const char *target)
{
    return renameat(AT_FDCWD, source, AT_FDCWD, target);
}

int unlinkat(int folder, const char *path, int flags)
{
    char place[PATH_MAX];
    REAL(int, unlinkat, int, const char *, int)
    JUDGE("unlink", OTHER, -1, absolute(folder, path, place))
    return real(folder, path, flags);
}

int unlink(const char *path)
{
    return unlinkat(AT_FDCWD, path, 0);
}

int rmdir(const char *path)
{
    return unlinkat(AT_FDCWD, path, AT_REMOVEDIR);
}

int mkdirat(int folder, const char *path, mode_t bits)
{
    char place[PATH_MAX];
    REAL(int, mkdirat, int, const char *, mode_t)
    JUDGE("mkdir", GROWS, -1, absolute(folder, path, place))
    return real(folder, path, bits);
}

int mkdir(const char *path, mode_t bits)
{
    return mkdirat(AT_FDCWD, path, bits);
}

int openat64(int folder, const char *path, int flags, ...)
{
    char place[PATH_MAX];
    va_list rest;
    va_start(rest, flags);
    mode_t bits = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    REAL(int, openat64, int, const char *, int, ...)
    if (atomic_load(&armed)) {
        const char *full = absolute(folder, path, place);
        if ((flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT) {
            JUDGE(flags & O_TRUNC ? "create" : "open", flags & O_CREAT ? GROWS : OTHER, -1, full)
        } else if (unreadable(full)) {
            errno = error_number;
            return -1;
        }
    }
    return real(folder, path, flags, bits);
}

#define WITH_BITS                                   \
    va_list rest;                                   \
    va_start(rest, flags);                          \
    mode_t bits = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest);

int openat(int folder, const char *path, int flags, ...)
{
    WITH_BITS
    return openat64(folder, path, flags, bits);
}

int open64(const char *path, int flags, ...)
{
    WITH_BITS
    return openat64(AT_FDCWD, path, flags, bits);
}

int open(const char *path, int flags, ...)
{
    WITH_BITS
    return openat64(AT_FDCWD, path, flags, bits);
}
