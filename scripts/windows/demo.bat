@echo off
rem Trains a LoRA on the tiny base model that ships with the package.
setlocal
cd /d "%~dp0..\.."
call "%~dp0_begin.bat"
if %ERRORLEVEL% equ 0 "%LORA_ROCM%" demo %*
call "%~dp0_end.bat" %ERRORLEVEL% "%~f0"
exit /b %ERRORLEVEL%
