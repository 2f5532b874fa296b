/* A stand-in for the programs that the .bat files start, and what starts the .bat files.
 *
 * Under any name it appends one JSON line to the file RECORDER_LOG: its name, its command line as it came, the arguments
 * as a C program reads them, the current folder and the environment. It prints RECORDER_SAYS_<name>, and exits with the
 * next number of the list RECORDER_CODES_<name> (the last one repeats; 0 without a list); a - of the name is a _ there.
 * With RECORDER_ASKS_<name>, a folder, it writes the same line to the file "question" there, waits for the file "answer",
 * prints all but its first line, and exits with the number in that line.
 * Named launch.exe it starts the command line that the file RECORDER_LINE holds, without a shell in between, and records
 * the exact exit code. Text is UTF-8. */
#include <windows.h>
#include <stdio.h>
#include <stdlib.h>
#include <wchar.h>

static char text[1 << 20];
static size_t used;

static void put(const char *more) {
    size_t length = strlen(more);
    if (used + length < sizeof text) {
        memcpy(text + used, more, length);
        used += length;
    }
}

static void put_string(const wchar_t *wide) {
    static char narrow[1 << 17];
    char escaped[8];
    WideCharToMultiByte(CP_UTF8, 0, wide, -1, narrow, sizeof narrow, NULL, NULL);
    put("\"");
    for (const unsigned char *p = (const unsigned char *)narrow; *p; p++) {
        sprintf(escaped, *p < 32 || *p == '"' || *p == '\\' ? "\\u%04x" : "%c", *p);
        put(escaped);
    }
    put("\"");
}

static const wchar_t *named(const wchar_t *prefix, const wchar_t *name) {
    wchar_t variable[300];
    swprintf(variable, 300, L"%ls%ls", prefix, name);
    for (wchar_t *p = variable; *p; p++)
        if (*p == '-')
            *p = '_';
    return _wgetenv(variable);
}

static void append(const wchar_t *path, const char *bytes, size_t count) {
    FILE *file = _wfopen(path, L"ab");
    if (!file || fwrite(bytes, 1, count, file) != count || fclose(file))
        exit(250);
}

static int next_code(const wchar_t *name, const wchar_t *log) {
    const wchar_t *list = named(L"RECORDER_CODES_", name);
    wchar_t counter[1000], *end;
    long calls = 0, code = 0;
    swprintf(counter, 1000, L"%ls.%ls", log, name);
    append(counter, "x", 1);
    FILE *file = _wfopen(counter, L"rb");
    fseek(file, 0, SEEK_END);
    calls = ftell(file);
    fclose(file);
    for (; list && *list && calls; calls--, list = *end ? end + 1 : end)
        code = wcstol(list, &end, 10);
    return code;
}

static int launch(const wchar_t *log) {
    static char bytes[1 << 16];
    static wchar_t line[1 << 16];
    STARTUPINFOW startup = {.cb = sizeof startup};
    PROCESS_INFORMATION process;
    DWORD code;
    FILE *file = _wfopen(_wgetenv(L"RECORDER_LINE"), L"rb");
    bytes[fread(bytes, 1, sizeof bytes - 1, file)] = 0;
    fclose(file);
    /* A busy Wine sometimes cannot start a process at once. Nothing has run then, so it may be tried again. */
    for (int tries = 1;; tries++) {
        MultiByteToWideChar(CP_UTF8, 0, bytes, -1, line, 1 << 16);
        if (CreateProcessW(NULL, line, NULL, NULL, TRUE, 0, NULL, NULL, &startup, &process))
            break;
        if (tries == 10) {
            fprintf(stderr, "CreateProcess: error %lu\n", GetLastError());
            return 251;
        }
        Sleep(500);
    }
    WaitForSingleObject(process.hProcess, INFINITE);
    GetExitCodeProcess(process.hProcess, &code);
    sprintf(text, "{\"program\": \"launch\", \"code\": %ld}\n", (long)code);
    append(log, text, strlen(text));
    return 0;
}

static int ask(const wchar_t *folder) {
    static char answer[1 << 20];
    wchar_t path[1000], made[1000];
    char *rest;
    FILE *file = NULL;
    swprintf(path, 1000, L"%ls\\question.part", folder);
    append(path, text, used);
    swprintf(made, 1000, L"%ls\\question", folder);
    if (!MoveFileW(path, made))
        exit(253);
    swprintf(path, 1000, L"%ls\\answer", folder);
    for (int waited = 0; !file; waited++, Sleep(20)) {
        if (waited == 2000)
            exit(254);
        file = _wfopen(path, L"rb");
    }
    answer[fread(answer, 1, sizeof answer - 1, file)] = 0;
    fclose(file);
    _wremove(path);
    long code = strtol(answer, &rest, 10);
    fputs(rest + 1, stdout);
    fflush(stdout);
    return code;
}

int _dowildcard = 0; /* arguments stay as they are */

int wmain(int count, wchar_t **arguments) {
    wchar_t path[1000], name[300], folder[1000];
    const wchar_t *log = _wgetenv(L"RECORDER_LOG");
    wchar_t *environment = GetEnvironmentStringsW();
    GetModuleFileNameW(NULL, path, 1000);
    _wsplitpath(path, NULL, NULL, name, NULL);
    if (!log)
        return 252;
    if (!wcscmp(name, L"launch"))
        return launch(log);
    GetCurrentDirectoryW(1000, folder);
    put("{\"program\": "), put_string(name), put(", \"path\": "), put_string(path);
    put(", \"line\": "), put_string(GetCommandLineW()), put(", \"folder\": "), put_string(folder);
    put(", \"arguments\": [");
    for (int i = 1; i < count; i++)
        put(i > 1 ? ", " : ""), put_string(arguments[i]);
    put("], \"environment\": [");
    for (wchar_t *p = environment; *p; p += wcslen(p) + 1)
        put(p > environment ? ", " : ""), put_string(p);
    put("]}\n");
    append(log, text, used);
    const wchar_t *asked = named(L"RECORDER_ASKS_", name);
    if (asked)
        return ask(asked);
    const wchar_t *says = named(L"RECORDER_SAYS_", name);
    if (says) {
        char narrow[4096];
        WideCharToMultiByte(CP_UTF8, 0, says, -1, narrow, sizeof narrow, NULL, NULL);
        fputs(narrow, stdout);
        fflush(stdout);
    }
    return next_code(name, log);
}
