@echo off
rem Runs the tests.   test.bat [pytest options]
setlocal
cd /d "%~dp0..\.."
call "%~dp0_begin.bat" --dev
if %ERRORLEVEL% equ 0 ".venv\Scripts\python.exe" -m pytest -n 2 %*
call "%~dp0_end.bat" %ERRORLEVEL% "%~f0"
exit /b %ERRORLEVEL%
