@echo off
rem Trains with a recipe; one can be dropped onto this file.   train.bat recipes\sdxl.yaml [options]
setlocal
call "%~dp0_begin.bat"
if %ERRORLEVEL% equ 0 "%LORA_ROCM%" train %*
call "%~dp0_end.bat" %ERRORLEVEL% "%~f0"
exit /b %ERRORLEVEL%
