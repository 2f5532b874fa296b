@echo off
rem Called first by the other files here: UTF-8, find Python, make .venv ready. Its exit code is that of the setup.
for /f "tokens=2 delims=:." %%c in ('chcp') do set "OLD_CODE_PAGE=%%c"
chcp 65001 >nul
set "PYTHONUTF8=1"
set "LORA_ROCM=%~dp0..\..\.venv\Scripts\lora-rocm.exe"
rem Each is tried for real: "py" may know no Python 3, and "python" may be the door to the Microsoft Store.
set "PYTHON=py -3"
%PYTHON% -c "" >nul 2>nul
if not errorlevel 1 goto found
set "PYTHON=python"
%PYTHON% -c "" >nul 2>nul
if not errorlevel 1 goto found
echo setup: Python was not found. Install Python 3.11 or newer from https://www.python.org and run this again. 1>&2
exit /b 3
:found
%PYTHON% "%~dp0..\setup_venv.py" %*
exit /b %ERRORLEVEL%
