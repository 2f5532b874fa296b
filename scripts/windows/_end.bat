@echo off
rem Called last by the other files here: _end.bat EXIT_CODE STARTED_FILE. Keeps a double-clicked window open.
if defined OLD_CODE_PAGE chcp %OLD_CODE_PAGE% >nul
if not defined CMDCMDLINE exit /b %~1
rem The Explorer starts a file as:  cmd.exe /c ""C:\...\demo.bat" "
set "LINE=%CMDCMDLINE:"='%"
call set "REST=%%LINE:''%~2' '=%%"
if not "%REST%"=="%LINE%" pause
exit /b %~1
