@echo off
rem Draws pictures with a LoRA.   sample.bat RUN_FOLDER_OR_LORA --prompt "a cat"
setlocal
call "%~dp0_begin.bat"
if %ERRORLEVEL% equ 0 "%LORA_ROCM%" sample %*
call "%~dp0_end.bat" %ERRORLEVEL% "%~f0"
exit /b %ERRORLEVEL%
