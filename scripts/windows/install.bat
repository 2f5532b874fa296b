@echo off
rem Makes .venv ready; safe to run again.   install.bat [--dev]
setlocal
call "%~dp0_begin.bat" %*
call "%~dp0_end.bat" %ERRORLEVEL% "%~f0"
exit /b %ERRORLEVEL%
